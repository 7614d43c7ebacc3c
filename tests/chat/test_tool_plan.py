"""tool_choice as a list of names: exactly these calls, in this order, in every format."""

from __future__ import annotations

import pytest

from agentspec.chat import formats
from agentspec.chat.parser import MessageParser
from agentspec.chat.tools import ToolChoice, Tools, call_grammar
from agentspec.errors import InvalidRequestError
from tests.chat.test_grammar import accepts, walk

pytestmark = pytest.mark.fast

PLACE = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
TOOLS = Tools.of(
    [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("look", "dig", "rest")]
)


@pytest.mark.parametrize("name", formats.names())
def test_exactly_the_plans_calls_may_come(name: str) -> None:
    format = formats.get(name)
    choice = ToolChoice.of(["look", "dig", "dig"], TOOLS)
    grammar = call_grammar(format, TOOLS, choice, {})
    for seed in range(3):
        text, ended = walk(grammar, seed)
        assert ended
        parser = MessageParser(format, TOOLS.schemas)
        parser.finish(text)
        calls = parser.message()["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["look", "dig", "dig"], text
    here = '{"at": "here"}'
    assert not accepts(grammar, format.write_all([("look", here), ("dig", here)]))
    assert not accepts(grammar, format.write_all([("dig", here), ("look", here), ("dig", here)]))


def test_a_plan_of_tools_that_are_not_offered_is_refused() -> None:
    for plan in (["look", "swim"], ["auto"], ["look", "any"]):
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            ToolChoice.of(plan, TOOLS)
