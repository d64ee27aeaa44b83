# The server, with torch for NVIDIA GPUs (target gpu, the default) or for CPUs alone (target cpu):
#     docker build --target cpu --tag dubito:cpu .
# A package index, certificates and the like come in as build arguments (PIP_INDEX_URL ...) or mounts; none is kept.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# The console's page /edge runs models in the browser: onnxruntime-web's files, from npm.
FROM ${BASE} AS wasm
ARG NPM_CONFIG_REGISTRY NODE_EXTRA_CA_CERTS
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends npm \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/edge/wasm.sh /wasm.sh
RUN sh /wasm.sh /wasm

# Our own code as a wheel: the only stage that a change of code builds anew, with the last layer below.
FROM ${BASE} AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
WORKDIR /src
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir setuptools==84.2.1 wheel==0.48.0
COPY pyproject.toml README.md LICENSE ./
COPY root root
COPY models models
COPY training training
COPY service service
COPY deploy deploy
COPY --from=wasm /wasm service/console/wasm
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

# What both targets share: a C compiler for Triton and torch.compile, an allocator that gives memory back, a user who
# may write to /cache only, and the embedded models as the content of a new /models.
FROM ${BASE} AS system
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libjemalloc2 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache dubito \
    && mkdir -p /cache /models/clothes/1 /models/digits/1 \
    && chown -R dubito:dubito /cache
COPY models/zoo/clothes.safetensors /models/clothes/1/model.safetensors
COPY models/zoo/digits.safetensors /models/digits/1/model.safetensors
ENV PATH=/opt/dubito/bin:$PATH \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    LD_PRELOAD=libjemalloc.so.2 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DUBITO_HOST=0.0.0.0 \
    DUBITO_MODELS=/models
VOLUME ["/models", "/cache"]
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]

FROM system AS cpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
# torch for CPUs comes from its own index. Where that is out of reach, LOCK=deploy/requirements.lock takes the other one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG LOCK=deploy/requirements-cpu.lock
COPY ${LOCK} /tmp/requirements.lock
RUN python3 -m venv /opt/dubito \
    && /opt/dubito/bin/pip install --no-cache-dir --no-deps --extra-index-url "${TORCH_INDEX}" \
        --requirement /tmp/requirements.lock
COPY --from=wheel /dist /tmp/dist
RUN /opt/dubito/bin/pip install --no-cache-dir --no-deps --no-index /tmp/dist/*.whl
USER 10001:10001
CMD ["dubito", "serve", "--device", "cpu"]

FROM system AS gpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY deploy/requirements.lock /tmp/requirements.lock
RUN python3 -m venv /opt/dubito \
    && /opt/dubito/bin/pip install --no-cache-dir --no-deps --requirement /tmp/requirements.lock
COPY --from=wheel /dist /tmp/dist
RUN /opt/dubito/bin/pip install --no-cache-dir --no-deps --no-index /tmp/dist/*.whl
USER 10001:10001
CMD ["dubito", "serve"]
