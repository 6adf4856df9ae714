# The programs of the image that `make image` builds without Docker, on Debian slim, for those who build with Docker:
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg VERSION=0.1.0 -t REPOSITORY:TAG .
# Both stages are Debian releases with the C library that the agent is linked against: it loads the driver's
# libnvidia-ml.so.1 at run time, so it cannot be static.

FROM golang:1.26-bookworm AS build
ARG VERSION=dev
ARG COMMIT=
# Keep in step with hookVersion in hack/image/compile.go.
ARG HOOK_VERSION=v1.20.1
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ENV CGO_ENABLED=1 GOFLAGS=-trimpath
RUN go build -tags grpcnotrace -buildvcs=false -o /out/usr/bin/ \
      -ldflags "-s -w -linkmode=external -extldflags=-Wl,-z,lazy \
        -X github.com/tandem-gpu/tandem/internal/version.Version=${VERSION} \
        -X github.com/tandem-gpu/tandem/internal/version.Commit=${COMMIT}" \
      ./cmd/kubelet-plugin ./cmd/controller
# Static: they run where there may be no C library.
RUN CGO_ENABLED=0 go build -tags grpcnotrace -buildvcs=false -o /out/usr/bin/ \
      -ldflags "-s -w -X github.com/tandem-gpu/tandem/internal/version.Version=${VERSION} \
        -X github.com/tandem-gpu/tandem/internal/version.Commit=${COMMIT}" \
      ./cmd/mps-daemon ./cmd/simulated-driver
# Static: the container runtime runs it on the host, whose C library may be older, or missing.
RUN mkdir /hook && cd /hook && go mod init tandem.invalid/hook && \
    go get github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook@${HOOK_VERSION} && \
    go build -buildvcs=false -o /out/usr/bin/nvidia-cdi-hook \
      -ldflags "-s -w -linkmode=external -X github.com/NVIDIA/nvidia-container-toolkit/internal/info.version=${HOOK_VERSION#v} \
        -extldflags '-static -Wl,--unresolved-symbols=ignore-in-object-files'" \
      github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook
# Licences of every module that a program was built from.
RUN for program in kubelet-plugin controller mps-daemon simulated-driver nvidia-cdi-hook; do go version -m /out/usr/bin/$program; done | \
      awk '$1 == "dep" { print $2 "@" $3 }' | sort -u | while read -r module; do \
        dir=$(cd / && go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p'); \
        find "$dir" -maxdepth 1 -type f -regextype posix-extended -iregex '.*/(licen[cs]e|copying|notice)([.-].*)?' \
          -exec install -D -m 0644 -t "/out/licenses/$module" {} +; \
      done

FROM debian:bookworm-slim AS runtime
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libgcc-s1 && rm -rf /var/lib/apt/lists/*
COPY LICENSE /licenses/tandem/LICENSE
COPY --from=build /out /
# The slim image drops most documentation but keeps the licences: /usr/share/doc/*/copyright.
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 0:0
WORKDIR /
LABEL org.opencontainers.image.title="tandem" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/tandem-gpu/tandem"
# The controller is /usr/bin/controller, what runs in the pod of an MPS daemon /usr/bin/mps-daemon.
ENTRYPOINT ["/usr/bin/kubelet-plugin"]
