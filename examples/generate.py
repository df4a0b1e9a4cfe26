"""Ask a model several questions in one conversation with onefold.generate; what is known of it is reused.

Takes a folder or a Hugging Face id; without one it runs on a small model that is fetched once (93 MB).
"""

import asyncio
import sys

import onefold  # before MLX: on a Linux CPU it loads a faster BLAS

model, tokenizer = onefold.load(sys.argv[1] if len(sys.argv) > 1 else "demo")

with onefold.PrefixCache(model, budget="1GB") as cache:
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    for question in ("What is a radix tree?", "And what is a trie?"):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = onefold.generate(model, tokenizer, prompt, cache=cache, max_tokens=32)
        messages.append({"role": "assistant", "content": answer})
        print(f"{question}\n  {answer}")

    # In an async server: the event loop goes on while a token is computed; a task that is cancelled commits.
    async def ask(question: str) -> None:
        text = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": question}], add_generation_prompt=True
        )
        async for response in onefold.async_stream_generate(model, tokenizer, text, cache=cache, max_tokens=16):
            last = response
        print(f"{question}\n  {last.cached_tokens} of {last.prompt_tokens} prompt tokens reused")

    asyncio.run(ask("Which of the two is smaller?"))
    print(cache)
