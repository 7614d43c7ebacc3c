"""Two LangGraph threads with a checkpointer, and a restart between their turns.

    python examples/langgraph_threads.py

Each thread is one trajectory, named by its thread_id: nothing has to be said to the model. Within a process a
turn finds the keys and values of the turns before it; after a restart the checkpointer brings the messages
back, and the first turn computes them again (`reused` is 0) under the same trajectory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from langchain_agentspec import ChatAgentSpec, close_engines
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

TURNS = {
    "ada": ["Name a river in France.", "Name another one.", "Which is the longer of the two?"],
    "grace": ["Name a mountain in Italy.", "Name another one.", "Which is the higher of the two?"],
}


def graph_of(model: ChatAgentSpec, saver: SqliteSaver) -> Any:
    """One node that answers. The model is called without any config: the graph's thread_id reaches it."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def turn(graph: Any, thread: str, question: str) -> AIMessage:
    config = {"configurable": {"thread_id": thread}}
    answer: AIMessage = graph.invoke({"messages": [HumanMessage(question)]}, config)["messages"][-1]
    stats = answer.response_metadata["call_stats"]
    print(
        f"{thread:6} trajectory={stats['trajectory_id']:6} call={stats['call_index']} "
        f"prompt={stats['prompt_tokens']:4} reused={stats['reused_tokens']:4}  "
        f"{' '.join(str(answer.content).split())[:60]}"
    )
    return answer


def main(arguments: list[str] | None = None, **options: Any) -> list[AIMessage]:
    """options: more of ChatAgentSpec's (an engine, in the tests)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args(arguments)
    options = {"model": given.model, "max_tokens": 24, "temperature": 0, **options}
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "threads.sqlite")
        with SqliteSaver.from_conn_string(database) as saver:
            graph = graph_of(ChatAgentSpec(**options), saver)
            for number in (0, 1):
                answers += [turn(graph, thread, questions[number]) for thread, questions in TURNS.items()]
        # What a new process would find: the database, and an engine that has seen nothing.
        close_engines()
        print("-- restarted --")
        with SqliteSaver.from_conn_string(database) as saver:
            graph = graph_of(ChatAgentSpec(**options), saver)
            answers += [turn(graph, thread, questions[2]) for thread, questions in TURNS.items()]
    return answers


if __name__ == "__main__":
    main()
