# syntax=docker/dockerfile:1

# An image of paceline: docker build --build-arg VERSION="$(python -m setuptools_scm)" -t REGISTRY/paceline:TAG .
# docs/how-to/kubernetes.md says what it is for. The version cannot be seen from in here, where there is no history.
# Every package is pinned with its hash: the image's in requirements.lock, and what builds the wheel in
# requirements-release.lock. Both stages have the same Python in the same place.
ARG PYTHON=3.12

# hadolint ignore=DL3006
FROM python:${PYTHON}-bookworm AS build

WORKDIR /src
COPY requirements.lock requirements-release.lock ./
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --requirement requirements.lock \
 && python -m pip install --no-cache-dir --require-hashes --requirement requirements-release.lock

# The native core (csrc/) is built with this stage's compiler. An image without it would be a slow one, so it is asked
# for.
COPY pyproject.toml setup.py README.md LICENSE ./
COPY csrc csrc
COPY src src
ARG VERSION=
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" \
    python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/paceline/bin/python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
 && /opt/paceline/bin/python -c 'import paceline.data._native'

# hadolint ignore=DL3006
FROM python:${PYTHON}-slim-bookworm

LABEL org.opencontainers.image.title="paceline" \
      org.opencontainers.image.description="Train image classifiers in synchronous data parallel" \
      org.opencontainers.image.licenses="Apache-2.0"

# train.compile has a C compiler build its launchers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 paceline \
 && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin paceline

COPY --from=build /opt/paceline /opt/paceline

# The two of NVIDIA are read by its container runtime, and by nobody where there is no GPU.
ENV PATH=/opt/paceline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# By number, so that a cluster can see that it is not root.
USER 1000:1000
WORKDIR /work
HEALTHCHECK NONE
ENTRYPOINT ["paceline"]
CMD ["--help"]
