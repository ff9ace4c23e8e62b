#!/bin/sh
# openblas.sh COMMAND WORD ...: runs a command whose programs use OpenBLAS. An OpenBLAS that does not know this processor
# computes as on one of 2004 (Prescott), which takes four times as long. This script then selects a processor that OpenBLAS
# knows and whose instructions this one has.
set -eu
cd "$(dirname "$0")/.."

core=$(OPENBLAS_VERBOSE=2 build/examples/fashion_mnist --help 2>&1 | sed -n 's/^Core: //p')
if [ "$core" = Prescott ] && [ -z "${OPENBLAS_CORETYPE:-}" ]; then
    case " $(grep -m 1 '^flags' /proc/cpuinfo) " in
    *" avx512bw "*) OPENBLAS_CORETYPE=SkylakeX ;;
    *" avx2 "*) OPENBLAS_CORETYPE=Haswell ;;
    esac
    if [ -n "${OPENBLAS_CORETYPE:-}" ]; then
        export OPENBLAS_CORETYPE
        echo "OpenBLAS does not know this processor and is told that it is like $OPENBLAS_CORETYPE (OPENBLAS_CORETYPE)"
    fi
fi
exec "$@"
