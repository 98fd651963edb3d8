"""Tries the server example with the official OpenAI client: `python client.py http://127.0.0.1:PORT`."""

import concurrent.futures
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=120)

models = [model.id for model in client.models.list()]
assert len(models) == 1, models
model = models[0]
assert client.models.retrieve(model).id == model

# a completion, whole and streamed
request = dict(model=model, prompt="It was a truth", max_tokens=12, temperature=0)
whole = client.completions.create(**request)
text = whole.choices[0].text
assert text == " to be, that she was not in the least to be", text
assert whole.choices[0].finish_reason == "length"
assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12), whole.usage
chunks = client.completions.create(**request, stream=True)
assert "".join(chunk.choices[0].text for chunk in chunks) == text

# stop strings, seeds, log-probabilities
stopped = client.completions.create(**request, stop=["e, th"])
assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" to b", "stop")
draws = [
    client.completions.create(model=model, prompt="It was", max_tokens=20, seed=seed).choices[0].text
    for seed in (7, 7, 8)
]
assert draws[0] == draws[1] != draws[2], draws
logprobs = client.completions.create(**request, logprobs=3).choices[0].logprobs
assert "".join(logprobs.tokens) == text and len(logprobs.top_logprobs[0]) == 3

# a chat, whole and streamed, with usage and log-probabilities
chat = dict(
    model=model,
    messages=[{"role": "system", "content": "Speak."}, {"role": "user", "content": "It was a truth"}],
    max_completion_tokens=12,
    temperature=0,
)
answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
content = answer.choices[0].message.content
tokens = answer.choices[0].logprobs.content
assert len(tokens) == 12 and len(tokens[0].top_logprobs) == 2 and tokens[0].logprob < 0
assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
streamed, usage = "", None
for chunk in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
assert streamed == content, (streamed, content)
assert usage.completion_tokens == 12 and usage.prompt_tokens_details.cached_tokens > 0

# errors are the client's own classes
for wrong, expected in [
    (dict(request, n=3), openai.BadRequestError),
    (dict(request, model="none"), openai.NotFoundError),
    (dict(request, prompt="a b " * 3000), openai.BadRequestError),
]:
    try:
        client.completions.create(**wrong)
        raise AssertionError(f"{expected} expected")
    except expected as error:
        assert error.body["message"], error

# 32 at once get what one alone gets; 50 that hang up leave a server that answers
def draw(seed):
    request = dict(model=model, prompt=f"Chapter {seed}", max_tokens=24, temperature=0.9, seed=seed)
    return client.completions.create(**request).choices[0].text

alone = [draw(seed) for seed in range(32)]
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    assert list(pool.map(draw, range(32))) == alone
for _ in range(50):
    stream = client.completions.create(**dict(request, max_tokens=480), stream=True)
    next(iter(stream))
    stream.close()
assert client.completions.create(**request).choices[0].text == text
print(f"openai {openai.__version__}: all as expected")
