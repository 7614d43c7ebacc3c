"""The command line: help, bad input, Ctrl-C, economics, doctor; and (ci) the demo on the real model."""

import json
import subprocess
import sys

import pytest

from agentspec import cli, doctor
from tests.engines.misbehaving import Misbehaving


def _run(*words, **kwargs):
    return subprocess.run([sys.executable, "-m", "agentspec", *words], capture_output=True, text=True, **kwargs)


@pytest.mark.fast
class TestCommand:
    def test_help_names_every_command(self, capsys):
        with pytest.raises(SystemExit) as end:
            cli.main(["--help"])
        out = capsys.readouterr().out
        assert end.value.code == 0 and all(command in out for command in cli._COMMANDS)

    @pytest.mark.parametrize("command", sorted(cli._COMMANDS))
    def test_every_command_has_help(self, command, capsys):
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        assert end.value.code == 0 and "--" in capsys.readouterr().out

    @pytest.mark.parametrize("words", [[], ["nonsense"], ["demo", "--nonsense"], ["economics", "--cost", "x"]])
    def test_unknown_words_are_errors(self, words, capsys):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 2 and "usage: agentspec" in capsys.readouterr().err

    def test_library_errors_end_with_2_and_one_line(self, capsys):
        assert cli.main(["economics", "--curve", "oops"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("agentspec economics: --curve: needed") and "Traceback" not in err

    def test_unknown_model(self):
        done = _run("demo", "--model", "./no-such-model")
        assert done.returncode == 2 and "nothing is there" in done.stderr and "Traceback" not in done.stderr

    @pytest.mark.parametrize("content", [None, "too short\n"])
    def test_docs_without_prose(self, tmp_path, content):
        directory = tmp_path / "docs"
        if content is not None:
            directory.mkdir()
            (directory / "a.md").write_text(content)
        done = _run("demo", "--docs", str(directory))
        assert done.returncode == 2 and "needed" in done.stderr

    def test_interrupt_is_said_in_one_line(self, monkeypatch, capsys):
        from agentspec import breakeven

        def interrupted(args):
            raise KeyboardInterrupt

        monkeypatch.setattr(breakeven, "run", interrupted)
        assert cli.main(["economics"]) == 130
        assert "interrupted" in capsys.readouterr().err


@pytest.mark.fast
class TestEconomics:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--drafted", "1.5"], "--drafted: needed whole numbers separated by commas, got '1.5'"),
            (["--acceptance", "x"], "--acceptance: needed numbers"),
            (["--drafted", "-1"], "drafted tokens k: needed a whole number from 0"),
            (["--drafted", "1" + "0" * 400], "drafted tokens k: needed a whole number from 0"),
        ],
    )
    def test_bad_numbers(self, words, told, capsys):
        assert cli.main(["economics", *words]) == 2
        assert told in capsys.readouterr().err

    def test_any_number_of_drafted_tokens_is_quick(self, capsys):
        assert cli.main(["economics", "--drafted", "100000000,9007199254740992", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["expected_tokens"][3] == pytest.approx([5.0, 5.0])

    def test_what_costs_is_heard_with_a_curve(self, capsys):
        def best(*words):
            assert cli.main(["economics", "--cost", "0.5", "--curve", "1:1,16:1", "--json", *words]) == 0
            return json.loads(capsys.readouterr().out)

        assert best()["speedup"] == best("--per", "step")["speedup"]
        assert best("--per", "token")["best_k"] == [1, 1, 1, 2, 3]
        assert best("--per", "step")["best_k"] == [8] * 5

    def test_table(self, capsys):
        assert cli.main(["economics"]) == 0
        out = capsys.readouterr().out
        assert "0.80   1.64   2.03   2.27   2.40   2.47   2.40        6" in out
        assert "0.100  0.171  0.233  0.287  0.376  0.445" in out

    def test_json_with_a_curve_and_a_share(self, capsys):
        words = ["economics", "--json", "--cost", "0", "--curve", "1:1,2:2.2,16:2.7", "--decode-share", "0.5"]
        assert cli.main([*words, "--acceptance", "0.8", "--drafted", "1,8"]) == 0
        table = json.loads(capsys.readouterr().out)
        alone = (1 - 0.8**9) / 0.2 / (2.2 + 0.5 * 7 / 14)
        assert table["speedup"][0][1] == pytest.approx(1 / (0.5 + 0.5 / alone))
        assert table["break_even_a"] is None and table["best_k"] == [8]


@pytest.mark.fast
class TestDoctor:
    def test_all_findings_are_well_formed(self):
        findings = doctor.examine()
        subjects = [f.subject for f in findings]
        assert {"agentspec", "torch", "device", "kernels", "smollm2", "cache", "sglang"} <= set(subjects)
        assert all(f.state in ("ok", "note", "missing") for f in findings)
        assert all(f.remedy for f in findings if f.state == "missing")

    def test_a_lack_is_named_with_its_command(self, monkeypatch, capsys):
        real = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda p: None if p == "opentelemetry-sdk" else real(p))
        assert cli.main(["doctor"]) == 1
        captured = capsys.readouterr()
        assert "pip install opentelemetry-sdk" in captured.out and "opentelemetry-sdk" in captured.err

    @pytest.mark.parametrize(
        ("package", "subject", "state", "remedy"),
        [
            ("uvicorn", "serve", "note", "pip install -e '.[serve]'"),
            ("langgraph", "langchain", "note", "pip install langchain langgraph"),
            ("opentelemetry-exporter-otlp-proto-http", "otlp", "note", "pip install -e '.[otlp]'"),
            *((p, p, "missing", f"pip install {p}") for p in ("llguidance", "httpx", "gguf", "accelerate")),
        ],
    )
    def test_each_lack_has_its_command(self, package, subject, state, remedy, monkeypatch):
        monkeypatch.setattr(doctor, "_version", lambda p: None if p == package else "1.0")
        monkeypatch.setattr(doctor, "_sglang", list)
        found = {f.subject: f for f in doctor._packages() + doctor._optional()}
        assert (found[subject].state, found[subject].remedy) == (state, remedy)
        assert all(f.state == "ok" for f in found.values() if f.subject != subject)

    def test_another_sglang_is_said(self, monkeypatch):
        from sglang_agentspec import diagnosis

        real = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda p: "0.6.0" if p == "sglang" else real(p))
        monkeypatch.setattr(diagnosis, "installed_sglang", lambda: "0.6.0")
        finding = next(f for f in doctor.examine() if f.subject == "sglang")
        assert finding.state == "missing" and "0.6.0" in finding.text and "0.5.23" in finding.remedy

    def test_a_server_is_looked_at(self, capsys):
        models = {"data": [{"id": "some-model", "owned_by": "somebody"}]}
        with Misbehaving(openai=models) as server:
            assert cli.main(["doctor", "--url", server.url]) == 0
        said = capsys.readouterr().out
        assert "some-model" in said and "plugin" in said
        assert cli.main(["doctor", "--url", server.url]) == 1
        assert "is the server running" in capsys.readouterr().out

    def test_json(self, capsys):
        cli.main(["doctor", "--json"])
        assert all({"subject", "state", "text", "remedy"} == set(f) for f in json.loads(capsys.readouterr().out))


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_demo_on_the_real_model():
    done = _run("demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    calls = report["calls"]
    assert len(calls) >= 8 and report["unequal_calls"] == []
    assert all(call["plain"]["verify_steps"] == call["plain"]["output_tokens"] for call in calls)
    # What a call's prompt shares with what the trajectory has read isn't read again.
    assert all(call["agentspec"]["reused_tokens"] > 0 for call in calls[1:])
    copying = [c["agentspec"] for c in calls if c["action"].startswith(("read", "search", "the notes"))]
    assert len(copying) >= 5
    steps, tokens = sum(c["verify_steps"] for c in copying), sum(c["output_tokens"] for c in copying)
    assert steps < tokens / 2
    # real answers: the model quotes what the tool returned
    first = calls[0]["text"].strip()
    assert len(first.split()) > 20 and first[:40] in _own_prose()


def _own_prose():
    from agentspec.demo import Documents

    return " ".join(" ".join(text.split()) for text in Documents(None).files.values())
