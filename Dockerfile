# bertvision with PyTorch's build for CPUs, in exactly the versions that the tests run with.
#
#   docker build --tag bertvision .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" bertvision status
#
# --build-arg TORCH=cu128, or another backend that `uv pip install --torch-backend` knows, is for GPUs.
FROM python:3.11-slim AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY . .
ARG TORCH=cpu
RUN uv venv /opt/bertvision \
    && uv pip install --no-cache --python /opt/bertvision/bin/python --torch-backend "$TORCH" \
        --constraint constraints.txt '.[quickstart]'

FROM python:3.11-slim
COPY --from=build /opt/bertvision /opt/bertvision
RUN useradd --create-home --uid 1000 bertvision && install --directory --owner bertvision /work
# HOME is a folder that any user may write to, as --user names one without a home
ENV PATH=/opt/bertvision/bin:$PATH HOME=/tmp
USER bertvision
WORKDIR /work
ENTRYPOINT ["bertvision"]
CMD ["--help"]
