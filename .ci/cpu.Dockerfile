# All frameworks, on a CPU:
#   docker build -f .ci/cpu.Dockerfile -t polyamp:cpu . && docker run --rm polyamp:cpu demo
FROM python:3.11.14-slim-bookworm

WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY polyamp polyamp
COPY backends backends
COPY examples examples
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt ".[all]"

RUN useradd --create-home polyamp
USER polyamp
WORKDIR /home/polyamp
ENTRYPOINT ["polyamp"]
CMD ["doctor"]
