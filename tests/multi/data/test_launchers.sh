#!/bin/sh
# Joins ranks under common launchers: Open MPI's mpirun (PMIx), MPICH's (PMI-1), and the variables of torchrun.
#     test_launchers.sh PATH_OF_launcher_probe
# Exit code 0: every launcher that is installed worked (missing ones are reported); 1: something failed.
probe=$1
[ -x "$probe" ] || { echo "usage: $0 PATH_OF_launcher_probe"; exit 2; }
export ASAN_OPTIONS=detect_leaks=0 # the launchers' own libraries leak
unset RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
unset PMIX_NAMESPACE PMIX_RANK PMI_FD PMI_RANK PMI_SIZE SHOAL_STORE_PORT SHOAL_SECRET
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
failed=0

# expect NAME EXIT_CODE LAUNCHER: every rank printed its line, once.
expect() {
    good=yes
    [ "$2" = 0 ] || good=no
    for rank in 0 1 2; do
        [ "$(grep -c "^rank $rank of 3 through $3.*: 0 1 2\$" "$out")" = 1 ] || good=no
    done
    if [ $good = yes ]; then
        echo "ok - $1"
    else
        echo "not ok - $1 (exit code $2)"
        cat "$out"
        failed=1
    fi
}

root=
[ "$(id -u)" = 0 ] && root=--allow-run-as-root
openmpi=
for name in mpirun.openmpi mpirun; do
    if [ -z "$openmpi" ] && command -v $name >/dev/null && $name --version 2>/dev/null | grep -q "Open MPI"; then
        openmpi=$name
    fi
done
if [ -n "$openmpi" ]; then
    timeout 60 "$openmpi" $root --oversubscribe -n 3 "$probe" >"$out" 2>&1
    expect "Open MPI" $? PMIx
    timeout 60 "$openmpi" $root --oversubscribe -n 3 "$probe" 5 >"$out" 2>&1
    expect "Open MPI, five times one after the other" $? PMIx
else
    echo "ok - Open MPI # SKIP no mpirun of it here"
fi

mpich=
for name in mpirun.mpich mpiexec.hydra; do
    if [ -z "$mpich" ] && command -v $name >/dev/null; then
        mpich=$name
    fi
done
if [ -n "$mpich" ]; then
    timeout 60 "$mpich" -n 3 "$probe" >"$out" 2>&1
    expect "MPICH" $? PMI-1
else
    echo "ok - MPICH # SKIP no mpirun.mpich or mpiexec.hydra here"
fi

# The variables that torchrun sets. torchrun itself owns MASTER_PORT.
base=$((20000 + $$ % 10000))
pids=
for rank in 0 1 2; do
    RANK=$rank WORLD_SIZE=3 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$base \
        TORCHELASTIC_RUN_ID=probe timeout 60 "$probe" 3 >"$out.$rank" 2>&1 &
    pids="$pids $!"
done
code=0
for pid in $pids; do
    wait "$pid" || code=$?
done
cat "$out.0" "$out.1" "$out.2" >"$out"
rm -f "$out.0" "$out.1" "$out.2"
expect "the variables of torchrun" $code torchrun
exit $failed
