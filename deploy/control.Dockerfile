# Control API and command line, without torch. Built by compose.yaml from the root of the repository.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

# The requirements as a file of their own: other edits of pyproject.toml leave the layers that install them in the cache.
FROM base AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py > requirements.txt

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
COPY --from=requirements /build/requirements.txt ./
RUN pip --python /opt/venv/bin/python install -r requirements.txt -c constraints.txt

FROM base
LABEL org.opencontainers.image.title="slipstream-control" \
      org.opencontainers.image.description="Slipstream: control API and command line" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# Bytecode comes with the installed files; at run time the file system is read-only.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# One number in both images: files in shared volumes belong to it. A new volume takes owner and mode of these directories.
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid slipstream --home-dir /var/lib/slipstream --no-create-home slipstream \
    && install -d -o slipstream -g slipstream -m 0750 /var/lib/slipstream /var/lib/slipstream/control /run/slipstream
COPY --from=dependencies /opt/venv /opt/venv
# Without its dependencies: the package names torch among them, and nothing in this image imports it.
COPY --from=wheel /build/dist /opt/slipstream
RUN pip --python /opt/venv/bin/python install --no-deps /opt/slipstream/*.whl \
    && ln -s /opt/venv/lib/python3*/site-packages/recipes /opt/slipstream/recipes
COPY deploy/health.py /opt/slipstream/
USER slipstream
WORKDIR /var/lib/slipstream
CMD ["control-api", "--help"]
