# Two ways to the same image:
#
#   docker build -t strait .                          builds the binary in the image's first stage
#   docker build -t strait --target prebuilt .        takes dist/strait, a static binary built outside,
#                                                     as `make image` does by buildah
#                                                     (another place: --build-arg BINARY=dist/amd64)
ARG RUST_VERSION=1.95

FROM rust:${RUST_VERSION}-bookworm AS build
WORKDIR /src
COPY . .
# For `strait --version`: docker build --build-arg STRAIT_COMMIT="$(git rev-parse --short=8 HEAD)"
ARG STRAIT_COMMIT=
# Static, so that the image can hold this one file. An explicit --target keeps the flag away from
# build scripts and procedural macros, which cannot be linked that way. Packed relocations (glibc
# 2.36) make the file smaller. Developer tools are left out.
RUN host="$(rustc -vV | sed -n 's/^host: //p')" \
    && RUSTFLAGS='-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs' \
       cargo build --release --locked --no-default-features --features kubernetes --bin strait \
       --target "$host" \
    && install -D --strip "target/$host/release/strait" /out/strait

FROM scratch AS runtime
LABEL org.opencontainers.image.title="strait" \
      org.opencontainers.image.description="An east-west gateway data plane for multicluster service meshes" \
      org.opencontainers.image.licenses="Apache-2.0"
# The user id that meshes give to their proxies; no port below 1024 is ever bound.
USER 1337:1337
# HBONE, metrics, readiness. Admin stays on loopback.
EXPOSE 15008 15020 15021 15090
# A pod's arguments take the place of CMD: `args: [proxy, waypoint, ...]`. Istio's paths are relative
# to the root.
WORKDIR /
ENTRYPOINT ["/strait"]
CMD ["run", "-c", "/etc/strait/strait.yaml"]

FROM runtime AS prebuilt
ARG BINARY=dist/strait
COPY ${BINARY} /strait

FROM runtime AS strait
COPY --from=build /out/strait /strait
