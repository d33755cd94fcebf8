# rlhf.c: `make` builds ./rlhf, `make test` runs the tests, `make help` lists the rest.
#
# Folders build into one static library each, in the order of who may include whom; linking in that
# order keeps includes honest. SAN=1: address and undefined sanitizers, TSAN=1: thread sanitizer, each in
# a build folder of its own.

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
LDLIBS  = $(shell pkg-config --libs $(PKGS)) $(shell mpicc --showme:link) -ldnnl -lcmocka -lm -lstdc++ -fopenmp

# Upper folders first: a static library only resolves symbols of the ones behind it.
FOLDERS = orchestrator actor critic reward generation model zeropp kernels core
sources = $(filter-out orchestrator/main.c,$(wildcard $(1)/*.c $(1)/*.cc $(if $(filter kernels,$(1)),kernels/cpu/*.c)))
objects = $(patsubst %,$(BUILD)/%.o,$(call sources,$(1)))
LIBS    = $(patsubst %,$(BUILD)/lib%.a,$(FOLDERS))

TESTS   = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))
SCRIPTS = $(patsubst tests/%.sh,%,$(wildcard tests/cli_*.sh))
TOOLS   = $(patsubst %.c,$(BUILD)/%,$(wildcard bench/*.c tests/parity.c))

all: rlhf
# Looked at each time: SAN=1 and BUILD=DIR put another program in the same place.
rlhf: $(BUILD)/rlhf
	@cmp -s $< $@ || { cp $< $@.tmp && mv $@.tmp $@; }
$(BUILD)/rlhf: $(BUILD)/orchestrator/main.c.o $(LIBS)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

define folder
$(BUILD)/lib$(1).a: $(call objects,$(1))
	@rm -f $$@ && ar rcs $$@ $$^
endef
$(foreach f,$(FOLDERS),$(eval $(call folder,$(f))))

$(BUILD)/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<
$(BUILD)/%.cc.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
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
ONLY ?= $(TESTS) $(SCRIPTS)
test: $(BUILD)/rlhf $(patsubst %,$(BUILD)/tests/%,$(filter test_%,$(ONLY)) $(if $(filter cli_fuzz,$(ONLY)),$(FUZZ)))
	@RLHF_BIN=$(abspath $(BUILD)/rlhf) tests/run.sh $(BUILD) $(ONLY)

# The demo on two ranks. Open MPI refuses root unless told otherwise.
demo: rlhf
	@OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 ./rlhf train recipes/demo.yaml --set run.overwrite=true

# Tokens per second of training, scoring and decoding and bytes per second of quantizing beside the
# machine's rates, and of tokenizing; bench/RESULTS.md.
bench: $(BUILD)/bench/bench_cpu $(BUILD)/bench/bench_quant $(BUILD)/bench/bench_tokenizer
	@$< $(THREADS)
	@$(BUILD)/bench/bench_quant
	@$(BUILD)/bench/bench_tokenizer $(or $(TOKENIZER),../shared/data/tokenizers/gpt2) \
	  $(or $(TEXT),../shared/data/tinystories/tinystories_sample.txt)

parity: $(BUILD)/tests/parity
	@$< $(or $(FIXTURES),../shared/fixtures)

help:
	@printf '%s\n' 'make            builds ./rlhf' \
	  'make demo       SFT, reward model and PPO on two ranks, from the repository alone' \
	  'make test       every test; ONLY="test_core_json cli_train" for some; SAN=1, TSAN=1 with sanitizers' \
	  'make parity     FIXTURES=DIR: every fixture folder against what PyTorch computes' \
	  'make bench      training, scoring, decoding and kernels beside the machine'"'"'s own rates' \
	  'make fuzz       TIME=seconds: libFuzzer on every reader (needs clang)' \
	  'make format     clang-format on every source' \
	  'make clean      removes the build folders'
clean:
	rm -rf build build-san build-tsan rlhf
format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cc')

.PHONY: help all rlhf test demo fuzz bench parity clean format
.SECONDARY: $(patsubst %,$(BUILD)/%.o,$(wildcard tests/*.c bench/*.c))
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
