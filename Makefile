# rlhf.c: `make` builds ./rlhf, `make test` runs the tests, `make help` lists the rest.
#
# Folders build into one static library each, in the order of who may include whom; linking in that
# order keeps includes honest. SAN=1: address and undefined sanitizers, TSAN=1: thread sanitizer, each in
# a build folder of its own.
#
# The CUDA back end is built where nvcc is (CUDA=0: without; sanitizer builds: only with CUDA=1). nvcc, cuBLASLt,
# cuDNN and NCCL are needed to build it, the last three as headers only: the program opens them when it opens a GPU.

BUILD  ?= build$(if $(SAN),-san)$(if $(TSAN),-tsan)
ARCH   ?= native
CC      = gcc
CXX     = g++
PKGS    = yaml-0.1 jansson libpcre2-8 zlib sentencepiece libutf8proc

WARN    = -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror
OPT     = -O3 -g -march=$(ARCH) -fno-math-errno -fno-trapping-math --param=vect-max-peeling-for-alignment=0
SANFLAGS = $(if $(SAN),-fsanitize=address$(,)undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1) \
           $(if $(TSAN),-fsanitize=thread -fno-omit-frame-pointer -O1)
, := ,
INCLUDE = -I. $(shell pkg-config --cflags $(PKGS)) $(addprefix -isystem ,$(patsubst -I%,%,$(filter -I%,$(shell mpicc --showme:compile))))
CFLAGS  = -std=c11 -D_GNU_SOURCE -ffp-contract=fast -fopenmp $(WARN) $(OPT) $(SANFLAGS) -MMD -MP $(INCLUDE)
CXXFLAGS = -std=c++17 $(WARN) -O2 -g $(SANFLAGS) -MMD -MP $(INCLUDE)
LDLIBS  = $(shell pkg-config --libs $(PKGS)) $(shell mpicc --showme:link) -ldnnl -lcmocka $(CUDALIBS) -lm -lstdc++ -fopenmp

# nvcc by PATH or in the usual place. CUDA_INC: further folders of headers (cudnn.h, nccl.h, cublasLt.h), such as
# pip's. CUDA_ARCHS: machine code for these; newer cards compile the PTX of compute_80 when they first run.
# CUDA_ARCHS=sm_90a builds in half the time, for one kind of card.
NVCC   ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA   ?= $(if $(SAN)$(TSAN),0,$(if $(NVCC),1,0))
CUDA_ARCHS ?= sm_80 sm_90a
CUDA_INC   ?=
ifeq ($(CUDA),1)
CUDA_HOME  ?= $(abspath $(dir $(shell readlink -f $(NVCC)))..)
CUDA_ISYSTEM = $(addprefix -isystem ,$(filter-out /usr/include,$(CUDA_INC) $(CUDA_HOME)/include))
CUDA_LIB    = $(firstword $(wildcard $(CUDA_HOME)/lib64/libcudart_static.a $(CUDA_HOME)/lib/libcudart_static.a \
              $(CUDA_HOME)/targets/*/lib/libcudart_static.a $(CUDA_HOME)/lib/*/libcudart_static.a))
CUDA_HEADERS = cuda_runtime.h cublasLt.h cudnn.h nccl.h
cuda_missing := $(strip $(foreach h,$(CUDA_HEADERS),$(shell printf '\043include <%s>\n' $h | \
  $(CC) -E -x c $(CUDA_ISYSTEM) - >/dev/null 2>&1 || echo $h)))
ifneq ($(filter-out help clean format,$(or $(MAKECMDGOALS),all)),)
ifeq ($(NVCC),)
$(error CUDA=1, but there is no nvcc: install the CUDA toolkit, name it by NVCC=, or build with CUDA=0)
endif
ifneq ($(cuda_missing),)
$(error nvcc is here ($(NVCC)), but not $(cuda_missing): install cuBLAS, cuDNN and NCCL for development, name the \
folders of their headers by CUDA_INC="DIR DIR" (pip: site-packages/nvidia/*/include), or build with CUDA=0)
endif
ifeq ($(CUDA_LIB),)
$(error no libcudart_static.a below $(CUDA_HOME): name the toolkit by CUDA_HOME=, or build with CUDA=0)
endif
endif
endif
cuda_number = $(patsubst sm_%,%,$(1))
# compute_80 comes as PTX too, in the same pass.
GENCODE  = $(foreach a,$(CUDA_ARCHS),-gencode 'arch=compute_$(call cuda_number,$a),code=[$a$(if $(filter sm_80,$a),$(,)compute_80)]')
# Two kinds of card are compiled for side by side: the longest files leave a core idle otherwise.
NVCCFLAGS = -std=c++20 -O3 --threads 2 -lineinfo $(GENCODE) -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow,-Werror,-g \
            -MMD -MP -D_GNU_SOURCE $(CUDA_ISYSTEM) $(filter-out -I%,$(INCLUDE)) -I.
CUDALIBS = $(if $(filter 1,$(CUDA)),$(CUDA_LIB) -ldl -lrt -lpthread)

# Upper folders first: a static library only resolves symbols of the ones behind it.
FOLDERS = orchestrator actor critic reward generation model zeropp kernels core
sources = $(filter-out orchestrator/main.c,$(wildcard $(1)/*.c $(1)/*.cc $(if $(filter kernels,$(1)),kernels/cpu/*.c $(CUDA_SOURCES))))
CUDA_SOURCES = $(if $(filter 1,$(CUDA)),kernels/cuda/*.cu,kernels/cuda/none.c)
objects = $(patsubst %,$(BUILD)/%.o,$(call sources,$(1)))
LIBS    = $(patsubst %,$(BUILD)/lib%.a,$(FOLDERS))

TESTS   = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))
SCRIPTS = $(patsubst tests/%.sh,%,$(wildcard tests/cli_*.sh))

# What takes nvcc longest comes first, so that no core waits for it at the end.
SLOW    = $(if $(filter 1,$(CUDA)),$(patsubst %,$(BUILD)/kernels/cuda/%.cu.o,linear_few sample quant_wide linear_stream_codes))

all: $(SLOW) rlhf
# Looked at each time: SAN=1 and BUILD=DIR put another program in the same place.
rlhf: $(BUILD)/rlhf
	@cmp -s $< $@ || { cp $< $@.tmp && mv $@.tmp $@; }
$(BUILD)/rlhf: $(BUILD)/orchestrator/main.c.o $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

define folder
$(BUILD)/lib$(1).a: $(call objects,$(1)) $(BUILD)/config
	@rm -f $$@ && ar rcs $$@ $$(filter %.o,$$^)
endef
$(foreach f,$(FOLDERS),$(eval $(call folder,$(f))))
# Changes when what is built with CUDA does, so that one build folder serves both.
$(BUILD)/config: FORCE
	@mkdir -p $(@D)
	@echo '$(CUDA) $(if $(filter 1,$(CUDA)),$(NVCC) $(CUDA_ARCHS) $(CUDA_INC))' | cmp -s - $@ || \
	  echo '$(CUDA) $(if $(filter 1,$(CUDA)),$(NVCC) $(CUDA_ARCHS) $(CUDA_INC))' >$@
FORCE:

# Most tests run the libraries' loops and few of their own: so they compile in a third of the time.
$(BUILD)/tests/%.c.o: OPT += $(if $(filter test_kernels_quant% test_kernels_sample,$(*F)),,-O1)
$(BUILD)/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<
$(BUILD)/%.cc.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(BUILD)/%.cu.o: %.cu $(BUILD)/config
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -c -o $@ $<
$(BUILD)/tests/test_%: $(BUILD)/tests/test_%.c.o $(BUILD)/tests/test.c.o $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/bench/%: $(BUILD)/bench/%.c.o $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/parity: $(patsubst %,$(BUILD)/%.o,$(wildcard tests/parity*.c)) $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

# Fuzz targets: with the small driver of tests/fuzz.c, and with libFuzzer where clang is.
FUZZ    = $(patsubst tests/%.c,%,$(wildcard tests/fuzz_*.c))
TIME   ?= 60
$(BUILD)/tests/fuzz_%: $(BUILD)/tests/fuzz_%.c.o $(BUILD)/tests/fuzz.c.o $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/libfuzzer/%: tests/%.c $(wildcard core/*.c generation/*.c) $(LIBS)
	@mkdir -p $(@D)
	clang -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined $(INCLUDE) -o $@ $^ $(LDLIBS)
fuzz: $(patsubst %,$(BUILD)/libfuzzer/%,$(FUZZ)) $(patsubst %,$(BUILD)/tests/%,$(FUZZ))
	@tests/fuzz.sh $(BUILD) $(TIME) $(FUZZ)

# `make test ONLY="test_core_json cli_train"` runs some.
ONLY ?= $(SCRIPTS) $(TESTS)
test: $(SLOW) $(BUILD)/rlhf $(patsubst %,$(BUILD)/tests/%,$(filter test_%,$(ONLY)) $(if $(filter cli_fuzz,$(ONLY)),$(FUZZ)))
	@RLHF_BIN=$(abspath $(BUILD)/rlhf) tests/run.sh $(BUILD) $(ONLY)

# The demo on two ranks. Open MPI refuses root unless told otherwise.
demo: rlhf
	@OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 ./rlhf train recipes/demo.yaml --set run.overwrite=true \
	  $(if $(DEVICE),--set run.device=$(DEVICE)) $(if $(PRECISION),--set run.precision=$(PRECISION))

# Tokens per second of training, scoring and decoding and bytes per second of quantizing beside the
# machine's rates, and of tokenizing; bench/RESULTS.md.
bench: $(BUILD)/bench/bench_cpu $(BUILD)/bench/bench_quant $(BUILD)/bench/bench_tokenizer
	@$< $(THREADS)
	@$(BUILD)/bench/bench_quant
	@$(BUILD)/bench/bench_tokenizer $(or $(TOKENIZER),../shared/data/tokenizers/gpt2) \
	  $(or $(TEXT),../shared/data/tinystories/tinystories_sample.txt)

parity: $(BUILD)/tests/parity
	@for p in $(or $(PRECISION),float32 $(if $(filter cuda,$(DEVICE)),bfloat16)); do \
	  $< $(or $(FIXTURES),../shared/fixtures) $(or $(DEVICE),cpu) $$p || exit 1; done

help:
	@printf '%s\n' 'make            builds ./rlhf' \
	  'make demo       SFT, reward model and PPO on two ranks, from the repository alone' \
	  'make test       every test; ONLY="test_core_json cli_train" for some; SAN=1, TSAN=1 with sanitizers;' \
  '                AT_ONCE=1: one at a time, not three' \
	  'make parity     FIXTURES=DIR: every fixture folder against what PyTorch computes' \
	  '                DEVICE=cuda PRECISION=bfloat16: on a GPU; make demo takes them, too' \
	  'make CUDA=0     without the CUDA back end; CUDA_ARCHS=sm_90a: for one kind of card, quick to build;' \
	  '                CUDA_INC="DIR DIR": where cudnn.h, nccl.h and cublasLt.h are, if not in the toolkit' \
	  'make bench      training, scoring, decoding and kernels beside the machine'"'"'s own rates' \
	  'make fuzz       TIME=seconds: libFuzzer on every reader (needs clang)' \
	  'make format     clang-format on every source' \
	  'make clean      removes the build folders'
clean:
	rm -rf build build-san build-tsan rlhf
format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cc' '*.cu')

.PHONY: FORCE help all rlhf test demo fuzz bench parity clean format
.SECONDARY: $(patsubst %,$(BUILD)/%.o,$(wildcard tests/*.c bench/*.c))
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
