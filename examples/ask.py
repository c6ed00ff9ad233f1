"""Asks a server that speaks OpenAI's API, all at once and piece by piece: examples/ask.py [URL]"""

import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "What are you?"}]
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40)
print(answer.choices[0].message.content, answer.usage)

for event in client.chat.completions.create(model=model, messages=messages, max_tokens=40, stream=True):
    print(event.choices[0].delta.content or "", end="", flush=True)
print()
