/* >>isa-code: which instruction set is in use */

/* Best first; the choice is among those that the processor has. */
static const tqkv__isa tqkv__isas[] = {
#ifdef TQKV__AVX512
    {"avx512", 16, &tqkv__codec_avx512, &tqkv__i_kernels_avx512},
#endif
#ifdef TQKV__AVX2
    {"avx2", 8, &tqkv__codec_avx2, &tqkv__i_kernels_avx2},
#endif
#ifdef TQKV__NEON
    {"neon", 4, &tqkv__codec_neon, NULL},
#endif
    {"scalar", 1, &tqkv__codec_scalar, &tqkv__kernels_scalar}};
#define TQKV__ISAS (sizeof tqkv__isas / sizeof tqkv__isas[0])

#ifdef TQKV__AVX2
/* Asks the processor and the system: __builtin_cpu_supports is the word of the compiler's runtime library, which clang
   for Windows lacks and in which zig answers 0. */
static bool tqkv__x86_present(bool avx512)
{
    const unsigned basic = bit_OSXSAVE | bit_FMA | bit_F16C, vectors = 0x06, wide_vectors = 0xe0;
    unsigned eax, ebx, ecx, edx, saved;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & basic) != basic) return false;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0)); /* the registers that the system saves */
    if ((saved & vectors) != vectors || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!avx512) return (ebx & bit_AVX2) != 0;
#ifdef __APPLE__ /* from their first use on */
    saved |= wide_vectors;
#endif
    const unsigned b = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    const unsigned c = bit_AVX512VBMI | bit_AVX512VNNI;
    return (saved & wide_vectors) == wide_vectors && (ebx & b) == b && (ecx & c) == c;
}
#endif

static bool tqkv__isa_present(const tqkv__isa *isa)
{
#ifdef TQKV__AVX2
    return isa && (isa->lanes == 1 || tqkv__x86_present(isa->lanes == 16));
#else
    return isa != NULL;
#endif
}

/* The library's only variable beside tqkv__products of NEON: set once, or by tqkv_isa_force */
static const tqkv__isa *tqkv__isa_chosen;

static const tqkv__isa *tqkv__isa_named(const char *name)
{
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (strcmp(name, tqkv__isas[i].name) == 0) return &tqkv__isas[i];
    return NULL;
}

static const tqkv__isa *tqkv__isa_now(void)
{
    const tqkv__isa *isa = __atomic_load_n(&tqkv__isa_chosen, __ATOMIC_ACQUIRE);
    if (isa) return isa;
    const char *wanted = getenv("TQKV_ISA");
    isa = wanted ? tqkv__isa_named(wanted) : NULL;
    if (wanted && !tqkv__isa_present(isa))
        TQKV_EXPLAIN(isa ? "TQKV_ISA: the processor lacks this instruction set; the best one that it has is in use"
                         : "TQKV_ISA: no instruction set of this build; the best one is in use");
    for (size_t i = 0; i < TQKV__ISAS && (!isa || !tqkv__isa_present(isa)); i++) isa = &tqkv__isas[i];
    const tqkv__isa *now = NULL; /* or what another thread has chosen in the meantime */
    const bool first =
        __atomic_compare_exchange_n(&tqkv__isa_chosen, &now, isa, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return first ? isa : now;
}

/* Returns the chosen set, or the next narrower one that has three vectors in a row of head_dim. A processor has the
   narrower ones, too: asking again takes microseconds in a virtual machine. */
static const tqkv__isa *tqkv__isa_for(int head_dim)
{
    const tqkv__isa *isa = tqkv__isa_now();
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (isa->lanes * 3 > head_dim && tqkv__isas[i].lanes < isa->lanes) isa = &tqkv__isas[i];
    return isa;
}

static const tqkv__isa *tqkv__narrower(const tqkv__isa *a, const tqkv__isa *b) { return a->lanes < b->lanes ? a : b; }

static const tqkv__codec *tqkv__codec_for(int head_dim) { return tqkv__isa_for(head_dim)->codec; }

#ifdef TQKV__NEON
static char tqkv__products; /* set once. 1: what every processor of a set has, 2: DotProd, 3: I8MM */

#ifdef __APPLE__
static bool tqkv__processor_has(const char *name)
{
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}
#endif

static int tqkv__find_products(void)
{
    bool bytes = false, matrices = false;
#if defined(__APPLE__)
    bytes = tqkv__processor_has("hw.optional.arm.FEAT_DotProd");
    matrices = tqkv__processor_has("hw.optional.arm.FEAT_I8MM");
#elif defined(__linux__)
    bytes = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#ifdef HWCAP2_I8MM
    matrices = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
#endif
#ifdef __ARM_FEATURE_DOTPROD
    bytes = true;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    matrices = true;
#endif
    return bytes ? matrices ? 3 : 2 : 1;
}

/* Returns the functions of attention by the best products of the processor, which is asked once. */
static const tqkv__kernels *tqkv__kernels_of_neon(void)
{
    char products = __atomic_load_n(&tqkv__products, __ATOMIC_RELAXED);
    if (!products) products = (char)tqkv__find_products();
    __atomic_store_n(&tqkv__products, products, __ATOMIC_RELAXED);
#ifdef TQKV__I8MM
    if (products > 2) return &tqkv__i_kernels_i8mm;
#endif
    return products > 1 ? &tqkv__i_kernels_dotprod : &tqkv__i_kernels_neon;
}
#endif

static const tqkv__kernels *tqkv__kernels_for(const tqkv__isa *isa)
{
#ifdef TQKV__NEON
    if (!isa->kernels) return tqkv__kernels_of_neon();
#endif
    return isa->kernels;
}

TQKV_API const char *tqkv_isa_name(void) { return tqkv__isa_now()->name; }

TQKV_API tqkv_result tqkv_isa_force(const char *name)
{
    const tqkv__isa *isa = name ? tqkv__isa_named(name) : NULL;
    if (name && !isa) return TQKV__INVALID("name: no instruction set");
    if (name && !tqkv__isa_present(isa)) return TQKV__REFUSE(UNSUPPORTED, "the processor lacks this instruction set");
    __atomic_store_n(&tqkv__isa_chosen, isa, __ATOMIC_RELEASE);
    return TQKV_OK;
}
