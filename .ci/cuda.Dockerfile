# PyTorch on NVIDIA GPUs, with the compiled extension. The wheels bring CUDA; the machine needs a driver for CUDA 13.
#   docker build -f .ci/cuda.Dockerfile -t polyamp:cuda . && docker run --rm --gpus all polyamp:cuda doctor --test
# --build-arg GPUS="9.0" builds the extension for these GPUs alone.
FROM python:3.11.14-slim-bookworm AS base
ARG GPUS="7.5;8.0;8.6;8.9;9.0;10.0;12.0"
ENV TORCH_CUDA_ARCH_LIST=$GPUS
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY polyamp polyamp
COPY backends backends
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt ".[torch,demo]"

FROM base AS compiled
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt ".[torch,cuda-build]"
ENV CUDA_HOME=/usr/local/lib/python3.11/site-packages/nvidia/cu13 POLYAMP_CACHE=/cache
RUN python -m polyamp.backends.torch.build

FROM base
RUN useradd --create-home polyamp
COPY --from=compiled --chown=polyamp /cache /home/polyamp/.cache/polyamp
USER polyamp
WORKDIR /home/polyamp
ENTRYPOINT ["polyamp"]
CMD ["doctor"]
