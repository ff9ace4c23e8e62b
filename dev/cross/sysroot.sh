#!/bin/sh
# Makes a folder with the aarch64 libraries that the tests need, and with these files:
#     run        runs an aarch64 program under qemu, which searches the folder first
#     place.ini  passes the folder to Meson
# The packages are downloaded for arm64 and unpacked there; the system's own packages and their lists stay as they are.
#     dev/cross/sysroot.sh build-aarch64/sysroot
set -eu

PACKAGES="libcmocka-dev libcmocka0 libsodium23"

[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
for tool in apt-get dpkg-deb aarch64-linux-gnu-gcc qemu-aarch64; do
    command -v $tool >/dev/null || {
        echo "sysroot.sh: there is no $tool here; dev/deps.sh aarch64 installs what is needed on Debian" >&2
        exit 2
    }
done
[ -e "$1/run" ] && exit 0 # run is written last
rm -rf "$1"
mkdir -p "$1"
cd "$1"

mkdir -p apt/state/lists/partial apt/cache/archives/partial
cat >apt/conf <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Dir::State "$PWD/apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$PWD/apt/cache";
END
# Other package sources of this machine may have nothing for arm64, so only the download below counts.
APT_CONFIG=apt/conf apt-get update -q >apt/log 2>&1 || true
# shellcheck disable=SC2086 # a list
(cd apt && APT_CONFIG=conf apt-get download -q $PACKAGES) >>apt/log 2>&1 || {
    tail -n 5 apt/log >&2
    echo "sysroot.sh: cannot download $PACKAGES for arm64" >&2
    exit 1
}
for package in apt/*.deb; do
    dpkg-deb -x "$package" .
done
ln -s "$(dirname "$(readlink -f "$(aarch64-linux-gnu-gcc -print-file-name=libc.so.6)")")" lib
rm -rf apt

printf "[constants]\nsysroot = '%s'\n" "$PWD" >place.ini
printf '#!/bin/sh\nexec qemu-aarch64 -L "%s" "$@"\n' "$PWD" >run.new
chmod +x run.new
mv run.new run
