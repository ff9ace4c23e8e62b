#!/bin/sh
# dev/sshd.sh DIRECTORY: unpacks Debian's sshd there, and the library that it needs and ssh does not. Installs and starts
# nothing: tests run it in containers of their own.
set -eu
directory=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
download() {
    apt-get download -q openssh-server libwrap0 >>log 2>&1
}
# The lists of packages may be missing, or older than what the server has.
download || { apt-get update -q >>log 2>&1 && download; } || { cat log >&2; exit 1; }
for package in *.deb; do
    dpkg -x "$package" "$work/unpacked"
done
rm -rf "$directory"
mv "$work/unpacked" "$directory"
