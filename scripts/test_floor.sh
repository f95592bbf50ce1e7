#!/bin/sh
# Token equality with the oldest transformers that is supported, beside the newest one that the environment has.
# usage: test_floor.sh PYTHON FOLDER [pytest arguments]
#
# That version and the huggingface_hub it needs are installed into FOLDER, without what they depend on (the environment
# has it), and put before the environment's by PYTHONPATH, which all processes of a run inherit. The matrix cells check
# in each worker that it runs the version that the tests run.
set -eu
python=$1 folder=$2
shift 2
floor=$(sed -n 's/^ *"transformers>=\([0-9.]*\).*/\1.0/p' pyproject.toml)
if [ ! -e "$folder/.transformers-$floor" ]; then
    "$python" -m pip install -q --no-deps --upgrade --target "$folder" "transformers==$floor" "huggingface_hub>=1.5,<2"
    touch "$folder/.transformers-$floor"
fi
PYTHONPATH=$(cd "$folder" && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH OMP_NUM_THREADS=1
"$python" -c "import transformers as t; assert t.__version__ == '$floor', t.__version__; print('transformers', t.__version__)"
exec "$python" -m pytest \
    tests/model/test_architectures.py tests/model/test_lean.py tests/model/test_loader.py tests/model/test_spec.py \
    "tests/model/test_worker_ranks.py::test_tensor_parallel[phi3-2]" \
    "tests/model/test_worker_ranks.py::test_tensor_parallel[olmo2-5]" \
    "tests/model/test_worker_stages.py::test_stages_give_the_tokens_of_transformers[llama-2-2]" \
    "tests/matrix/test_equality.py::test_greedy[llama-2-1-plain]" \
    "tests/matrix/test_equality.py::test_greedy[gemma2-2-2-tight]" "$@"
