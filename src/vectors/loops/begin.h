/* >>kernels: what the loops of attention and of encoding share */

#define TQKV__VECTOR TQKV__(vector)
typedef uint32_t TQKV__(words) __attribute__((vector_size(4 * TQKV__LANES)));

TQKV__OP TQKV__VECTOR TQKV__(load)(const float *p)
{
    TQKV__VECTOR x;
    memcpy(&x, p, sizeof x);
    return x;
}

TQKV__OP void TQKV__(store)(float *p, TQKV__VECTOR x) { memcpy(p, &x, sizeof x); }

TQKV__OP TQKV__VECTOR TQKV__(abs)(TQKV__VECTOR x) { return (TQKV__VECTOR)((TQKV__(words))x & 0x7fffffffu); }

TQKV__OP TQKV__VECTOR TQKV__(copysign)(TQKV__VECTOR magnitude, TQKV__VECTOR sign)
{
    return (TQKV__VECTOR)((TQKV__(words))magnitude | ((TQKV__(words))sign & 0x80000000u));
}
