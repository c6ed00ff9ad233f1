"""OpenAI's client: embeddings in base64, which it asks for by itself, in numbers, and of fewer dimensions."""

import math

import openai
from client_cases import MODEL, run

client = openai.OpenAI(max_retries=0, timeout=60)
TEXTS = ["a text", "another text"]


def embeddings_in_each_encoding() -> None:
    packed = client.embeddings.create(model=MODEL, input=TEXTS)
    numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert packed.usage.prompt_tokens == sum(map(len, TEXTS))
    for first, second in zip(packed.data, numbers.data, strict=True):
        assert first.embedding == second.embedding
        assert math.isclose(math.hypot(*first.embedding), 1, abs_tol=1e-5)


def embeddings_of_fewer_dimensions() -> None:
    (entry,) = client.embeddings.create(model=MODEL, input="a text", dimensions=8).data
    assert len(entry.embedding) == 8 and math.isclose(math.hypot(*entry.embedding), 1, abs_tol=1e-5)


def too_many_dimensions_are_refused() -> None:
    try:
        client.embeddings.create(model=MODEL, input="a text", dimensions=100_000)
    except openai.BadRequestError as error:
        assert error.param == "dimensions"
        return
    raise AssertionError("no error")


if __name__ == "__main__":
    run(embeddings_in_each_encoding, embeddings_of_fewer_dimensions, too_many_dimensions_are_refused)
