"""Certificates of authorities of ours, made by the program openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def make_certificates(folder: Path, *names: str) -> None:
    """Writes NAME-ca.pem of an authority for each name, and NAME.pem with NAME.key that it has signed. Skips the test
    where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    for name in names:
        command = ["openssl", "req", "-x509", *CURVE, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem"]
        subprocess.run([*command, "-subj", f"/CN={name}"], cwd=folder, check=True, capture_output=True)
        command = ["openssl", "req", "-x509", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        command += ["-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-subj", "/CN=node"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
