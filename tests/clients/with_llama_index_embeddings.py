"""LlamaIndex: embeddings of texts, and of a query."""

import os

from client_cases import MODEL, URL, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

model = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=os.environ["OPENAI_API_KEY"], max_retries=0)


def texts_and_query() -> None:
    first, second = model.get_text_embedding_batch(["a text", "another text"])
    assert len(first) == len(second) and first != second
    assert model.get_query_embedding("a text") == first


if __name__ == "__main__":
    run(texts_and_query)
