"""LangChain: embeddings of documents and of a query, as texts: its own tokenizer knows OpenAI's models only."""

from client_cases import MODEL, run
from langchain_openai import OpenAIEmbeddings

embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, max_retries=0)


def documents_and_query() -> None:
    first, second = embeddings.embed_documents(["a text", "another text"])
    assert len(first) == len(second) and first != second
    assert embeddings.embed_query("a text") == first


if __name__ == "__main__":
    run(documents_and_query)
