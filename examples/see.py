"""Draws a picture, and asks the model that ships what it sees: examples/see.py [URL]"""

import base64
import io
import sys

import openai
from PIL import Image, ImageDraw

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id

picture = Image.new("RGB", (300, 300), "white")
draw = ImageDraw.Draw(picture)
draw.ellipse((30, 60, 120, 150), fill=(214, 40, 40))
draw.rectangle((170, 80, 250, 160), fill=(40, 80, 210))
file = io.BytesIO()
picture.save(file, "PNG")
image = {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}

for question in ("What do you see?", "How many shapes are there?", "What colour is the square?"):
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)
    print(question, answer.choices[0].message.content)
