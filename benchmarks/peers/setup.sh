#!/bin/sh
# Make the environment that benchmarks/loaders.py measures other loaders in: sh benchmarks/peers/setup.sh FOLDER [PYTHON]
#
# It shares torch and torchvision with the environment of PYTHON (default: .venv/bin/python), so that all contenders
# decode with the same libraries. FFCV is compiled, and needs OpenCV and libjpeg-turbo with their headers, on Debian:
#   apt-get install --no-install-recommends g++ pkg-config libopencv-dev libturbojpeg0-dev
set -eu
folder=$1
python=${2:-.venv/bin/python}
"$python" -m venv "$folder"
shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$shared" > "$own/shared.pth"
"$folder/bin/python" -m pip install --requirement "$(dirname "$0")/requirements.txt"
