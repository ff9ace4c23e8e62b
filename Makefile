# The main commands. Meson builds; these targets install missing packages, build and run.
#
#   make demo    trains the Fashion-MNIST example with two workers
#   make demo-torch   trains a network with PyTorch, two workers, backend "shoal"
#   make test    most tests of the plain build, and the main ones of the Python front-ends, about ten minutes on two cores
#   make test-all   builds in several ways and runs every test, about half an hour; make test-rest: all that make test leaves out
#   make demo-job   a SageMaker notebook's cell: data on a local S3 server, two hosts, report page, endpoint
#   make test-gpu   runs seven tests of devices over this machine's CUDA driver, and benchmarks against NCCL, Gloo and copies
#   make test-versions   runs tests of the front-ends with other versions of Python and the frameworks; fetches gigabytes
#   make test-scripts   runs published scripts of SageMaker's model-parallel library, versions 1 and 2, fetched from GitHub
#   make bench   benchmarks every collective against Intel MPI, Open MPI and MPICH
#   make bench-hosts  over emulated hosts, against Open MPI and Gloo
#   bench/bench_step.py  training steps over emulated hosts and through PyTorch, against Gloo
#   bench/bench_scaling.py, bench/bench_memory.py  steps over emulated hosts and memory of a rank, next to what is predicted
#   make bench-torch  PyTorch's back-end, against Gloo and DeepSpeed
#   make build   the command build/shoal, and the libraries in the same folder
#   make wheels  the wheels of a release, for x86-64 and aarch64, checked: build/wheels (docs/releasing.md)
#   make docs    the site at build/docs/html/index.html (manual, docs/, commands, examples, figures) and manual pages;
#                   RELEASE=1: the site of this version, in a folder of its own, which later ones link to
#   make deps    installs only the packages that the targets need
#   make check   the checks that need no build: dependencies between modules, symbols, format
#   make clean   removes build directories

WORKERS ?= 2
TORCH ?= 2.13.0
DEEPSPEED ?= 0.19.8
IMPI ?= 2021.19.0
NCCL ?= 2.32.3

# Variables for Python in a checkout.
FROM_PYTHON = PYTHONPATH=$(CURDIR)/python SHOAL_LIBRARY=$(CURDIR)/build/libshoal.so

.PHONY: all build demo demo-torch demo-job test test-all test-rest test-gpu test-versions test-scripts bench bench-hosts bench-torch wheels docs check deps clean

all: build

deps:
	@dev/deps.sh build test bench python docs aarch64

build/build.ninja:
	@dev/deps.sh build
	@echo "configuring build/"
	@meson setup build >/dev/null || { cat build/meson-logs/meson-log.txt; exit 1; }

# Prints that it builds only if there is something to build.
build: build/build.ninja
	@ninja -C build --quiet -n | grep -qx 'ninja: no work to do.' || \
	 { echo "building; the first time takes half a minute"; ninja -C build --quiet; }
	@echo "built: build/shoal"

demo:
	@echo "make demo: two workers train in C: half a minute, and another half for building the first time"
	@$(MAKE) --no-print-directory build
	@dev/deps.sh demo
	dev/openblas.sh build/shoal run -n $(WORKERS) build/examples/fashion_mnist $(ARGS)

demo-torch:
	@echo "make demo-torch: two workers train with PyTorch: less than a minute"
	@[ -e build/torch/made ] || \
	 echo "this first time it also builds Shoal, installs PyTorch (1 GB) and compiles the backend: a minute or more"
	@$(MAKE) --no-print-directory build build/torch/made
	@dev/deps.sh python
	$(FROM_PYTHON) build/shoal run -n $(WORKERS) build/torch/bin/python3 examples/torch/fashion_mnist/train.py $(ARGS)

demo-job:
	@echo "make demo-job: trains on two hosts of this machine, asks the model, writes a report"
	@echo "it takes less than a minute on two idle cores"
	@[ -e build/job/made ] || \
	 echo "this first time it also builds Shoal, installs PyTorch (1 GB) and compiles the backend: some minutes more"
	@$(MAKE) --no-print-directory build build/job/made
	@dev/deps.sh demo
	@PYTHONPATH=$(CURDIR)/python:$(CURDIR)/python/smdistributed SHOAL_LIBRARY=$(CURDIR)/build/libshoal.so \
	 PATH=$(CURDIR)/build:$$PATH build/job/bin/python3 examples/job/demo.py

CUDA ?= libcuda.so.1
test-gpu: export CUDA_DEVICE_MAX_CONNECTIONS ?= 32
test-gpu: build build/nccl
	@dev/deps.sh test
	SHOAL_TEST_CUDA=$(CUDA) build/tests/unit/test_gpu_kernels
	SHOAL_TEST_CUDA=$(CUDA) build/tests/multi/test_device_reducer 'the same bits'
	SHOAL_TEST_CUDA=$(CUDA) build/tests/multi/test_device_offload 'the same bits'
	SHOAL_TEST_CUDA=$(CUDA) build/tests/multi/test_device_exact $(ARGS)
	SHOAL_TEST_CUDA=$(CUDA) build/tests/multi/test_device_faults $(ARGS)
	SHOAL_TEST_CUDA=$(CUDA) build/tests/multi/test_device_peers $(ARGS)
	SHOAL_TEST_CUDA=$(CUDA) $${SHOAL_TEST_PYTHON:-python3} tests/python/test_device.py
	SHOAL_TEST_CUDA=$(CUDA) $${SHOAL_TEST_PYTHON:-python3} tests/python/test_gpu_scripts.py
	build/shoal bench allreduce --memory gpu --in-place --check --min 4K --iterations 5
	build/shoal bench step --memory gpu --profile resnet50 --backward 40
	bench/bench_gpu.py

# NCCL is measured for comparison and never shipped. Without it, Shoal and plain copies are measured.
build/nccl:
	@dev/deps.sh bench
	@echo "installing NCCL $(NCCL) at build/nccl"
	@dev/pip.py build/nccl --no-deps nvidia-nccl-cu13==$(NCCL) || echo "no NCCL $(NCCL) from pip: without it"

# `make test` is half of `make test-all`, and `make test-rest` the other half.
test: build/torch/made
	@echo "make test: most tests of the plain build, and the main ones of the Python front-ends, about ten minutes on two cores; make test-all runs everything"
	@dev/deps.sh build demo test
	@$(call with_sphinx)
	@dev/test.py --part main --install '$(call with_packages,job tensorflow)' $(ARGS)

test-all test-rest: build/torch/made build/torch/deepspeed
	@echo "make $@: five builds and every front-end, about half an hour on two cores"
	@dev/deps.sh build demo test
	@$(call with_sphinx)
	@dev/deps.sh aarch64 || echo "without them the build for aarch64 is skipped"
	@dev/test.py $(if $(filter test-rest,$@),--part rest) --install '$(call with_packages,$(BESIDE))' $(ARGS)

with_sphinx = $(MAKE) --no-print-directory build/sphinx/made || echo "without it the tests of site and manual pages are skipped"
with_packages = make --no-print-directory --keep-going $(1:%=build/%/made) || echo "what needs these is skipped"

test-versions: build build/torch/made
	@dev/deps.sh python
	@dev/versions.py $(ARGS)

# ARGS="--from DIR" takes them from git repositories on this machine.
test-scripts: build build/torch/made build/trainers/made
	@dev/deps.sh python
	@dev/scripts.py $(ARGS)
	@dev/published.py $(ARGS)
	@meson test -C build --print-errorlogs torch_tsm_published

bench: build build/impi
	@dev/deps.sh bench
	@bench/bench.py $(ARGS)

# Intel MPI is measured for comparison and never shipped. Without it the other peers are measured.
build/impi:
	@dev/deps.sh bench
	@echo "installing Intel MPI $(IMPI) at build/impi"
	@dev/pip.py build/impi --no-deps impi-rt==$(IMPI) impi-devel==$(IMPI) || \
	 echo "no Intel MPI $(IMPI) from pip: without it"

# Without PyTorch its tests are skipped and Gloo is not measured; everything else works. Jobs and their tests install
# packages with its pip. The file `made` marks a complete environment. Its bin/python3 is a link to the machine's Python, so
# a new time there would change that file's time, and meson would configure the build again while tests run.
build/torch/made:
	@dev/deps.sh python
	@echo "installing PyTorch $(TORCH) at build/torch"
	@dev/pip.py build/torch pip setuptools torch==$(TORCH) numpy && touch $@ || echo "no PyTorch $(TORCH) from pip: without it, and without Gloo"

# For tests and measurements. If pip cannot install it, the next target that uses it tries again.
build/torch/deepspeed: build/torch/made
	@dev/pip.py build/torch deepspeed==$(DEEPSPEED) && touch $@ || echo "no DeepSpeed $(DEEPSPEED) from pip: without its engines and its all-reduce"

# Packages of training jobs, and software that tests run with Shoal: a virtual environment for each dev/venv/NAME.txt, with
# NAME.alone.txt.
.SECONDEXPANSION:
# Not in BESIDE: only `make test-scripts` needs it.
build/scripts/made: dev/venv/scripts.txt | build/torch/made
	@dev/venv.sh scripts

BESIDE = job inference kubeflow notebooks sdk2 sdk3 tensorflow toolkit trainers
$(BESIDE:%=build/%/made): build/%/made: dev/venv/%.txt $$(wildcard dev/venv/$$*.alone.txt) | build/torch/made
	@dev/venv.sh $*

bench-hosts: build build/torch/made
	@dev/deps.sh bench
	@bench/bench.py 'hosts-*' $(ARGS)

bench-torch: build build/torch/made build/torch/deepspeed
	@dev/deps.sh bench
	@build/torch/bin/python3 bench/bench_torch.py $(ARGS)

# Takes a minute of two cores for each wheel. ARGS=--twice builds twice and compares; ARGS=--try installs them on Debian 11.
wheels: build/wheel-tools/made
	@dev/deps.sh wheels
	@dev/wheels.py $(ARGS)

# Not in BESIDE: no test needs a compiler of 100 MB.
build/wheel-tools/made: dev/venv/wheel-tools.txt
	@dev/deps.sh wheels
	@dev/venv.sh wheel-tools

docs: build build/sphinx/made
	@build/sphinx/bin/python3 docs/sphinx/make.py html build/docs build/shoal $(if $(RELEASE),--release)
	@build/sphinx/bin/python3 docs/sphinx/make.py man build/docs build/shoal
	@echo "made: build/docs/html/index.html and manual pages, as in: man -M build/docs shoal_allreduce"

# Sphinx, Hawkmoth and libclang. The build makes manual pages if it finds them, so it has to be configured again.
build/sphinx/made: docs/sphinx/requirements.txt
	@dev/deps.sh docs
	@echo "installing Sphinx at build/sphinx"
	@rm -rf build/sphinx
	@dev/pip.py build/sphinx --requirement docs/sphinx/requirements.txt || { rm -rf build/sphinx; exit 1; }
	@touch $@
	@[ ! -e build/build.ninja ] || meson setup --reconfigure build >/dev/null

check:
	@dev/check.py

clean:
	rm -rf build build-*
