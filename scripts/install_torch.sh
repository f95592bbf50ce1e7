#!/bin/sh
# Install torch into a virtual environment: its CPU build where there is no NVIDIA GPU, else the default build.
# usage: install_torch.sh PYTHON REQUIREMENT INDEX VERSION   (REQUIREMENT and INDEX may be empty)
set -eu
python=$1 requirement=$2 index=$3 version=$4

pip_install() {
    if [ -n "$index" ]; then
        "$python" -m pip install --index-url "$index" "$@"
    else
        "$python" -m pip install "$@"
    fi
}

if [ -n "$requirement" ]; then
    # The variable is a pip requirement list, so word splitting is wanted.
    # shellcheck disable=SC2086
    pip_install $requirement
elif [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1; then
    echo '   an NVIDIA GPU is here: the default build'
    pip_install "torch>=2.11"
elif [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
    echo "   no GPU here: the CPU build of torch $version"
    if ! pip_install "torch==$version+cpu" 2>/dev/null; then
        echo '   the package index that pip uses has no CPU build of torch; taking the default build, which is larger.'
        echo '   (TORCH_INDEX=URL names another index: the one that PyTorch publishes for CPU builds.)'
        pip_install "torch==$version"
    fi
else
    pip_install "torch==$version"
fi
"$python" -W ignore -c 'import torch; print("   torch", torch.__version__)'
