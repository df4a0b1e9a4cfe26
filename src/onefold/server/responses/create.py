"""POST /v1/responses and /v1/responses/input_tokens: a request made into a plan. Nothing is kept afterwards."""

from __future__ import annotations

from typing import Any

from onefold.engine.request import Request, Sampling
from onefold.server import constraints
from onefold.server.body import parse
from onefold.server.options import most_tokens
from onefold.server.reply import Plan
from onefold.server.responses import translate
from onefold.server.responses.schemas import FunctionTool, InputTokensRequest, ResponsesRequest, ToolChoice
from onefold.server.responses.writer import ResponseWriter
from onefold.server.service import Service

LOGPROBS = "message.output_text.logprobs"
"""What `include` has if logprobs are asked for."""


def plan(service: Service, body: bytes, namespace: str) -> Plan:
    """Blocks while the prompt is made. Raises RequestError."""
    asked = parse(body, ResponsesRequest)
    service.check_model(asked.model)
    sampling = asked.sampling(service.defaults())
    offer = translate.offer(asked)
    for kind in translate.left_out(asked):
        service.log_once(f"tools of the type {kind!r} are left out of /v1/responses: only the model runs here")
    messages, options = translate.messages(asked), translate.template_options(asked)
    logprobs = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    request = Request(
        prompt=service.engine.chat(messages, tools=offer.tools, template_options=options),
        max_tokens=most_tokens(asked.max_output_tokens, service.settings.max_tokens),
        sampling=sampling,
        top_logprobs=(asked.top_logprobs or 0) if logprobs else None,
        tools=offer.tools,
        constraint=constraints.constraint(translate.shape(asked), offer.rule),
        namespace=namespace,
    )
    given = repeated(asked, service.model, sampling)
    return Plan((request,), ResponseWriter(given, custom=offer.custom, logprobs=logprobs), bool(asked.stream))


def input_tokens(service: Service, body: bytes) -> dict[str, Any]:
    """Blocks while the prompt is made. Raises RequestError."""
    asked = parse(body, InputTokensRequest)
    service.check_model(asked.model)
    tools, options = translate.offer(asked).tools, translate.template_options(asked)
    messages = translate.messages(asked)
    prompt = service.engine.chat(messages, tools=tools, template_options=options, of_any_length=True)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def repeated(asked: ResponsesRequest, model: str, sampling: Sampling) -> dict[str, Any]:
    """Returns the fields of a response that repeat its request, as it was understood: the sampling that was used, the
    tools that the model can be offered."""
    text = asked.text.model_dump(by_alias=True, exclude_unset=True) if asked.text else {}
    choice = asked.tool_choice
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": model,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": choice.model_dump(exclude_unset=True) if isinstance(choice, ToolChoice) else choice or "auto",
        "tools": _tools(asked),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }


def _tools(asked: ResponsesRequest) -> list[dict[str, Any]]:
    made = []
    for tool in asked.tools or ():
        if not isinstance(tool, dict):
            always = {"parameters": tool.parameters, "strict": tool.strict} if isinstance(tool, FunctionTool) else {}
            made.append(tool.model_dump(exclude_unset=True) | always)
    return made
