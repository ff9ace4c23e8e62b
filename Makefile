# The front door. Meson does the building; these targets install what is missing, build and run.
#
#   make demo    trains the Fashion-MNIST example with two workers
#   make demo-torch   trains a network with PyTorch, two workers, backend "shoal"
#   make test    builds in several ways and runs every test
#   make bench   measures every collective beside Intel MPI, Open MPI and MPICH
#   make bench-hosts  over emulated hosts, beside Open MPI and Gloo
#   make bench-torch  PyTorch's back-end, beside Gloo and DeepSpeed
#   make build   the command at build/shoal, the libraries beside it
#   make docs    the site at build/docs/html/index.html (manual, docs/, commands, examples, figures) and manual pages, by Sphinx
#   make deps    installs what the targets need, and nothing else
#   make check   the checks that need no build: dependencies between modules, symbols, format
#   make clean   removes build directories

WORKERS ?= 2
TORCH ?= 2.13.0
DEEPSPEED ?= 0.19.8
IMPI ?= 2021.19.0
KUBEFLOW ?= 0.5.0
KUBEFLOW_API ?= 2.3.0

# What Python in a checkout needs to know.
FROM_PYTHON = PYTHONPATH=$(CURDIR)/python SHOAL_LIBRARY=$(CURDIR)/build/libshoal.so

.PHONY: all build demo demo-torch test bench bench-hosts bench-torch docs check deps clean

all: build

deps:
	@dev/deps.sh build test bench python docs aarch64

build/build.ninja:
	@dev/deps.sh build
	@echo "configuring build/"
	@meson setup build >/dev/null || { cat build/meson-logs/meson-log.txt; exit 1; }

# Says that it builds only where there is something to build.
build: build/build.ninja
	@ninja -C build --quiet -n | grep -qx 'ninja: no work to do.' || \
	 { echo "building; the first time takes half a minute"; ninja -C build --quiet; }
	@echo "built: build/shoal"

demo: build
	@dev/deps.sh demo
	build/shoal run -n $(WORKERS) build/examples/fashion_mnist $(ARGS)

demo-torch: build build/torch/bin/python3
	@dev/deps.sh python
	$(FROM_PYTHON) build/shoal run -n $(WORKERS) build/torch/bin/python3 examples/torch/fashion_mnist/train.py $(ARGS)

test: build/torch/bin/python3 build/torch/deepspeed
	@dev/deps.sh build demo test
	@$(MAKE) --no-print-directory build/sphinx/bin/python3 || echo "without it the tests of site and manual pages are skipped"
	@$(MAKE) --no-print-directory build/job/bin/python3 || echo "without it the tests of training jobs with data in S3 are skipped"
	@$(MAKE) --no-print-directory build/inference/bin/python3 || echo "without it the endpoint is not compared with the vendor's"
	@$(MAKE) --no-print-directory build/sdk3/bin/python3 || echo "without it the tests with SageMaker's SDK v3 are skipped"
	@$(MAKE) --no-print-directory build/toolkit/bin/python3 || echo "without it the tests with SageMaker's toolkit are skipped"
	@$(MAKE) --no-print-directory build/kubeflow/bin/python3 || echo "without it the proofs that Kubeflow takes our manifests are skipped"
	@dev/deps.sh aarch64 || echo "without them the build for aarch64 is skipped"
	@$(MAKE) --no-print-directory build/sdk2/bin/python3 || echo "without it our estimators are not compared with those of SageMaker's SDK"
	@dev/test.py $(ARGS)

bench: build build/impi
	@dev/deps.sh bench
	@bench/bench.py $(ARGS)

# Intel MPI is measured beside Shoal and never shipped. Without it the other peers are measured.
build/impi:
	@dev/deps.sh bench
	@echo "installing Intel MPI $(IMPI) at build/impi"
	@python3 -m venv build/impi
	@build/impi/bin/pip install --quiet --no-deps impi-rt==$(IMPI) impi-devel==$(IMPI) || \
	 echo "no Intel MPI $(IMPI) from pip: without it"

# Without PyTorch its tests are skipped and Gloo is not measured; all else goes on.
build/torch/bin/python3:
	@dev/deps.sh python
	@echo "installing PyTorch $(TORCH) at build/torch"
	@python3 -m venv build/torch
	@build/torch/bin/pip install --quiet torch==$(TORCH) numpy || echo "no PyTorch $(TORCH) from pip: without it, and without Gloo"

# For tests and for measurements. Tried again by the next target that wants it where pip could not have it.
build/torch/deepspeed: build/torch/bin/python3
	@build/torch/bin/pip install --quiet deepspeed==$(DEEPSPEED) && touch $@ || echo "no DeepSpeed $(DEEPSPEED) from pip: without its engines and its all-reduce"

# For training jobs: data in S3 (tests have moto's server), the endpoint. It sees the packages of build/torch.
build/job/bin/python3: dev/job-requirements.txt build/torch/bin/python3
	@echo "installing what training jobs use at build/job"
	@rm -rf build/job && python3 -m venv build/job
	@build/job/bin/pip install --quiet --requirement dev/job-requirements.txt || { rm -rf build/job; exit 1; }
	@ls -d $(CURDIR)/build/torch/lib/python3*/site-packages > $$(ls -d build/job/lib/python3*/site-packages)/torch.pth
	@touch $@

# The vendor's server for models, beside which the endpoint is tested. It needs pkg_resources, which setuptools has lost.
build/inference/bin/python3:
	@echo "installing the vendor's server for models at build/inference"
	@rm -rf build/inference && python3 -m venv build/inference
	@build/inference/bin/pip install --quiet sagemaker-inference==1.10.1 'setuptools<81' || { rm -rf build/inference; exit 1; }
	@touch $@

# The SageMaker Python SDK v2, with which tests compare our estimators.
build/sdk2/bin/python3: dev/sdk2-requirements.txt
	@echo "installing SageMaker's SDK v2 at build/sdk2"
	@rm -rf build/sdk2 && python3 -m venv build/sdk2
	@build/sdk2/bin/pip install --quiet --requirement dev/sdk2-requirements.txt || { rm -rf build/sdk2; exit 1; }
	@touch $@

# SageMaker's training toolkit, for the tests that train with it, and an sshd that it starts in containers of theirs. Of what the
# toolkit and the SDK below ask for, only what training needs is installed.
TOOLKIT = sagemaker-training==5.1.4 sagemaker-pytorch-training==3.0.0
build/toolkit/bin/python3: dev/toolkit-requirements.txt build/torch/bin/python3
	@echo "installing SageMaker's training toolkit at build/toolkit"
	@rm -rf build/toolkit && python3 -m venv build/toolkit
	@build/toolkit/bin/pip install --quiet --requirement dev/toolkit-requirements.txt && \
	 build/toolkit/bin/pip install --quiet --no-deps $(TOOLKIT) && \
	 dev/sshd.sh build/toolkit/sshd || { rm -rf build/toolkit; exit 1; }
	@ls -d $(CURDIR)/build/torch/lib/python3*/site-packages > $$(ls -d build/toolkit/lib/python3*/site-packages)/torch.pth
	@touch $@

# SageMaker's Python SDK v3, for the tests that make a job with it.
SDK3 = sagemaker-train==1.27.0 sagemaker-core==2.27.0 pandas
build/sdk3/bin/python3: dev/sdk3-requirements.txt build/torch/bin/python3
	@echo "installing SageMaker's SDK v3 at build/sdk3"
	@rm -rf build/sdk3 && python3 -m venv build/sdk3
	@build/sdk3/bin/pip install --quiet --requirement dev/sdk3-requirements.txt && \
	 build/sdk3/bin/pip install --quiet --no-deps $(SDK3) || { rm -rf build/sdk3; exit 1; }
	@ls -d $(CURDIR)/build/torch/lib/python3*/site-packages > $$(ls -d build/sdk3/lib/python3*/site-packages)/torch.pth
	@touch $@
# Kubeflow's own models of what `shoal job` writes for it, for tests.
build/kubeflow/bin/python3:
	@echo "installing Kubeflow's client $(KUBEFLOW) at build/kubeflow"
	@rm -rf build/kubeflow && python3 -m venv build/kubeflow
	@build/kubeflow/bin/pip install --quiet kubeflow==$(KUBEFLOW) kubeflow-trainer-api==$(KUBEFLOW_API) || { rm -rf build/kubeflow; exit 1; }

bench-hosts: build build/torch/bin/python3
	@dev/deps.sh bench
	@bench/bench.py 'hosts-*' $(ARGS)

bench-torch: build build/torch/bin/python3 build/torch/deepspeed
	@dev/deps.sh bench
	@build/torch/bin/python3 bench/bench_torch.py $(ARGS)

docs: build build/sphinx/bin/python3
	@build/sphinx/bin/python3 docs/sphinx/make.py html build/docs build/shoal
	@build/sphinx/bin/python3 docs/sphinx/make.py man build/docs build/shoal
	@echo "made: build/docs/html/index.html and manual pages, as in: man -M build/docs shoal_allreduce"

# Sphinx, Hawkmoth and libclang. The build makes manual pages where it finds them, so it has to look again.
build/sphinx/bin/python3: docs/sphinx/requirements.txt
	@dev/deps.sh docs
	@echo "installing Sphinx at build/sphinx"
	@rm -rf build/sphinx && python3 -m venv build/sphinx
	@build/sphinx/bin/pip install --quiet --requirement docs/sphinx/requirements.txt || { rm -rf build/sphinx; exit 1; }
	@touch $@
	@[ ! -e build/build.ninja ] || meson setup --reconfigure build >/dev/null

check:
	@dev/check.py

clean:
	rm -rf build build-*
