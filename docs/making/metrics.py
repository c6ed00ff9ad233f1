"""The table of the page of counters: every metric of `/metrics`, as its declaration explains it."""

from penstock.server.http.segment_metrics import declared_metrics


def page() -> str:
    lines = ["| metric | what it is | look at it when |", "|---|---|---|"]
    for spec in declared_metrics():
        text = f"histogram: {spec.help}" if spec.kind == "histogram" else spec.help
        lines.append(f"| `{spec.sample_name}` | {text} | {spec.look} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
