"""LangChain's chat model for OpenAI's API."""

from __future__ import annotations

from typing import Any

from cell import (
    CALL,
    GREET,
    GREETING,
    MODEL,
    REPORT,
    RESULT,
    SECONDS,
    SYSTEM,
    TOKENS,
    TOOL,
    URL,
    WEATHER,
    Cells,
    Forecast,
    main,
)
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI

SAME: Any = {"base_url": f"{URL}/v1", "api_key": "any", "model": MODEL, "max_tokens": TOKENS, "timeout": SECONDS}
chat = ChatOpenAI(max_retries=0, **SAME)
MESSAGES: Any = [("system", SYSTEM), ("user", GREET)]
QUESTION: Any = [("system", SYSTEM), ("user", WEATHER)]


class Langchain(Cells):
    def test_chat(self) -> None:
        self.assertEqual(chat.invoke(MESSAGES).content, GREETING)

    def test_stream(self) -> None:
        self.streamed([chunk.text for chunk in chat.stream(MESSAGES)], GREETING)

    def test_tools(self) -> None:
        bound = chat.bind_tools([TOOL])
        first = bound.invoke(QUESTION)
        call = self.one(first.tool_calls)
        self.assertEqual((call["name"], call["args"]), (CALL["name"], CALL["arguments"]))
        done = bound.invoke([*QUESTION, first, ToolMessage(RESULT, tool_call_id=call["id"])])
        self.assertEqual(done.content, REPORT)
        whole: Any = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        self.assertEqual([call["args"] for call in whole.tool_calls], [CALL["arguments"]])

    def test_forced(self) -> None:
        call = self.one(chat.bind_tools([TOOL], tool_choice="any").invoke(MESSAGES).tool_calls)
        self.forced(call["name"], call["args"])
        by_tool = chat.with_structured_output(Forecast, method="function_calling").invoke(MESSAGES)
        self.assertIsInstance(by_tool, Forecast)

    def test_structured(self) -> None:
        self.assertIsInstance(chat.with_structured_output(Forecast, method="json_schema").invoke(MESSAGES), Forecast)

    def test_responses(self) -> None:
        chat = ChatOpenAI(max_retries=0, use_responses_api=True, **SAME)
        self.assertEqual(chat.invoke(MESSAGES).text, GREETING)
        self.streamed([chunk.text for chunk in chat.stream(MESSAGES)], GREETING)
        call = self.one(chat.bind_tools([TOOL]).invoke(QUESTION).tool_calls)
        self.assertEqual((call["name"], call["args"]), (CALL["name"], CALL["arguments"]))

    def test_usage(self) -> None:
        for _ in range(2):
            usage: Any = chat.invoke(MESSAGES).usage_metadata
        self.counted(usage["input_tokens"], usage["output_tokens"], usage["input_token_details"]["cache_read"])


if __name__ == "__main__":
    main(Langchain)
