#!/bin/sh
# venv.sh NAME: makes build/NAME, a virtual environment with the packages of dev/venv/NAME.txt and, without their
# dependencies, those of dev/venv/NAME.alone.txt. Tests run this software with Shoal, or training jobs use it. Removes a
# half-made environment.
set -eu

name=$1
folder=build/$name
cd "$(dirname "$0")/.."
echo "installing the packages of dev/venv/$name.txt at $folder"
trap 'code=$?; [ $code = 0 ] || rm -rf "$folder"' EXIT
rm -rf "$folder"
dev/pip.py "$folder" --requirement "dev/venv/$name.txt"
if [ -e "dev/venv/$name.alone.txt" ]; then
    dev/pip.py "$folder" --no-deps --requirement "dev/venv/$name.alone.txt"
fi
case $name in
job | notebooks | scripts | sdk3 | toolkit | trainers) # scripts that train
    echo "$PWD"/build/torch/lib/python3*/site-packages >"$(echo "$folder"/lib/python3*/site-packages)/torch.pth" ;;
esac
case $name in
toolkit) dev/sshd.sh "$folder/sshd" ;; # it starts one in its own containers
esac
touch "$folder/made"
