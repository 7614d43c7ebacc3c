"""Make agentspec/drafting/language.txt.gz: the text that the mixture's language table is filled from.

    python benchmarks/make_language.py [--out PATH]

Data: the Python standard library (3.11; PSF licence): the language reference in pydoc_data.topics, and the
modules
named below. It has nothing to do with any trace: it teaches what English prose, code and punctuation look
like in
the target's tokens, so that a trajectory's first outputs find something.
"""

from __future__ import annotations

import argparse
import gzip
import pydoc_data.topics
import sysconfig
from pathlib import Path

MODULES = (
    "argparse.py", "subprocess.py", "pathlib.py", "logging/__init__.py", "json/__init__.py", "json/decoder.py",
    "unittest/case.py", "sqlite3/dump.py", "shutil.py", "tempfile.py", "typing.py", "dataclasses.py",
    "http/client.py", "asyncio/base_events.py", "email/message.py", "csv.py", "datetime.py", "threading.py", "os.py",
    "re/__init__.py", "random.py", "urllib/parse.py", "zipfile.py", "configparser.py", "cmd.py", "pdb.py",
    "tarfile.py", "inspect.py", "collections/__init__.py", "functools.py",
)  # fmt: skip


def text() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [(library / name).read_text(encoding="utf-8") for name in MODULES if (library / name).is_file()]
    return "\n".join([*modules, *pydoc_data.topics.topics.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = Path(__file__).resolve().parents[1] / "agentspec" / "drafting" / "language.txt.gz"
    parser.add_argument("--out", type=Path, default=package)
    args = parser.parse_args()
    args.out.write_bytes(gzip.compress(text().encode("utf-8"), 9, mtime=0))
    print(f"wrote {args.out}, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
