#!/bin/sh
# Installs missing packages for the given purposes (build, demo, test, bench, python, docs, aarch64, wheels, chroots) through
# apt. Without root or apt, lists them and exits with 2.
set -eu

packages_for() {
    case $1 in
    build) echo "gcc libc6-dev meson ninja-build pkg-config python3 zlib1g-dev libopenblas-dev libsodium23 libpmix-dev" \
                "libfabric1" ;;
    demo) echo "dataset-fashion-mnist libopenblas0" ;;
    test) echo "libcmocka-dev clang libclang-rt-14-dev clang-format llvm g++ openmpi-bin libopenmpi-dev mpich libmpich-dev" \
               "python3 iproute2 iperf3 util-linux groff-base slurmctld slurmd slurm-client munge chromium" ;;
    bench) echo "openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2 iperf3 util-linux python3-venv" ;;
    python) echo "python3-venv python3-dev g++ bible-kjv-text dataset-fashion-mnist" ;;
    docs) echo "python3-venv gcc libc6-dev" ;;
    aarch64) echo "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" ;;
    wheels) echo "git binutils libpmix-dev pkg-config python3-venv g++ g++-aarch64-linux-gnu" ;;
    chroots) echo "mmdebstrap qemu-user-static util-linux iproute2" ;;
    *) echo "deps.sh: unknown purpose \"$1\": build, demo, test, bench, python, docs, aarch64, wheels or chroots" >&2; exit 2 ;;
    esac
}

missing=
for purpose in "$@"; do
    packages=$(packages_for "$purpose")
    for package in $packages; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
    done
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "These Debian packages are missing; install them (or their like) and run again:" >&2
    printf '   %s\n' $missing >&2
    exit 2
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ apt-get update -q && apt-get install -y -q --no-install-recommends $missing; } >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
