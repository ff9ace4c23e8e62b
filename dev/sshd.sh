#!/bin/sh
# dev/sshd.sh DIRECTORY: unpacks Debian's sshd there, with the library that it needs and ssh does not. Installs and starts
# nothing: tests run it in their own containers.
set -eu
directory=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
download() {
    apt-get download -q openssh-server libwrap0 >>log 2>&1
}
# The package lists may be missing, or older than the server's packages.
download || { apt-get update -q >>log 2>&1 && download; } || { cat log >&2; exit 1; }
for package in *.deb; do
    dpkg -x "$package" "$work/unpacked"
done
rm -rf "$directory"
mv "$work/unpacked" "$directory"
