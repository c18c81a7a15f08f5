// The mathematics of each optimizer, once: scalars of a segment, and steps over whatever Vec is asked for.
//
// [Note: a new rule] is a struct here with a row in ZO_RULES, and a value of zo_rule in zero_offload.h.
//
// [Note: rounding] Each line is one IEEE operation per call, rounded once; `fma` is the only fused one.
// Before a rule comes g = grad * grad_scale. Constants come rounded to float. A port that keeps these lists
// returns the same bits.
//
// [Note: roots] A rule has kStates states, of which the first kSigned may be below 0 and the others are means
// or sums of squares. Where the last is one of those, `step` leaves its root behind the states: a state that
// rests as codes is stored by its root. So `states` has one element more than the rule has states.
#pragma once

#include <cmath>

#include "optim/update.h"

namespace zo {

// Everything of a segment that does not depend on the element, computed in double and rounded to float once.
// A rule reads what it knows.
struct UpdateScalars {
    float grad_scale;
    float decay;  // 1 - lr * weight_decay
    float l2;     // weight_decay, where it is added to the gradient
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float neg_step_size;  // -step_size of the rule
    float grad_share;     // SGD: 1 - dampening; 1 in the first step
    float first_sum;      // Adagrad: the initial sum in the first step; later 0
    uint32_t key[2];      // of random words; of a range within which `origin` does not pass 2^32
};

namespace {

template <class W>
struct Lanes {
    using F = typename W::F;
    explicit Lanes(const UpdateScalars &s)
        : grad_scale(W::set(s.grad_scale)),
          decay(W::set(s.decay)),
          l2(W::set(s.l2)),
          beta1(W::set(s.beta1)),
          beta2(W::set(s.beta2)),
          one_minus_beta1(W::set(s.one_minus_beta1)),
          one_minus_beta2(W::set(s.one_minus_beta2)),
          inv_sqrt_bias2(W::set(s.inv_sqrt_bias2)),
          eps(W::set(s.eps)),
          neg_step_size(W::set(s.neg_step_size)),
          grad_share(W::set(s.grad_share)),
          first_sum(W::set(s.first_sum)) {}
    F grad_scale, decay, l2, beta1, beta2, one_minus_beta1, one_minus_beta2, inv_sqrt_bias2, eps,
        neg_step_size, grad_share, first_sum;
};

enum class Decay { kDecoupled, kL2 };

// Kingma and Ba 2015 (arXiv:1412.6980), Loshchilov and Hutter 2019 (arXiv:1711.05101), Reddi et al. 2018:
//     p = p * decay                           decoupled
//     g = fma(l2, p, g)                       L2
//     m = fma(1 - beta1, g - m, m)
//     v = fma(beta2, v, (1 - beta2) * (g * g))
//     x = v > x ? v : x                       AMSGrad, whose root is that of x
//     d = fma(sqrt(v), 1 / sqrt(1 - beta2^t), eps)
//     p = fma(-lr / (1 - beta1^t), m / d, p)
template <Decay kDecay, bool kAmsgrad>
struct AdamRule {
    static constexpr int kStates = kAmsgrad ? 3 : 2, kSigned = 1;
    static double step_size(const zo_segment &s) { return s.lr / (1.0 - std::pow(s.beta1, double(s.step))); }
    template <class W>
    static void step(const Lanes<W> &c, typename W::F g, typename W::F &p, typename W::F *states) {
        typename W::F &m = states[0], &v = states[1];
        if (kDecay == Decay::kDecoupled) {
            p = W::mul(p, c.decay);
        } else {
            g = W::fma(c.l2, p, g);
        }
        m = W::fma(c.one_minus_beta1, W::sub(g, m), m);
        v = W::fma(c.beta2, v, W::mul(c.one_minus_beta2, W::mul(g, g)));
        if (kAmsgrad) states[2] = W::greater(v, states[2]);
        const typename W::F root = states[kStates] = W::sqrt(states[kStates - 1]);
        p = W::fma(c.neg_step_size, W::div(m, W::fma(root, c.inv_sqrt_bias2, c.eps)), p);
    }
};

// Duchi et al. 2011, with torch's decay of the learning rate:
//     g = fma(l2, p, g)
//     s = fma(g, g, s + first)                 first: the initial sum in the first step, later 0
//     p = fma(-lr / (1 + (t - 1) * lr_decay), g / (sqrt(s) + eps), p)
struct AdagradRule {
    static constexpr int kStates = 1, kSigned = 0;
    static double step_size(const zo_segment &s) { return s.lr / (1.0 + double(s.step - 1) * s.beta1); }
    template <class W>
    static void step(const Lanes<W> &c, typename W::F g, typename W::F &p, typename W::F *states) {
        g = W::fma(c.l2, p, g);
        states[0] = W::fma(g, g, W::add(states[0], c.first_sum));
        states[1] = W::sqrt(states[0]);
        p = W::fma(c.neg_step_size, W::div(g, W::add(states[1], c.eps)), p);
    }
};

// Chen et al. 2023 (arXiv:2302.06675):
//     p = p * decay
//     p = fma(-lr, sign(fma(1 - beta1, g - m, m)), p)
//     m = fma(1 - beta2, g - m, m)
struct LionRule {
    static constexpr int kStates = 1, kSigned = 1;
    static double step_size(const zo_segment &s) { return s.lr; }
    template <class W>
    static void step(const Lanes<W> &c, typename W::F g, typename W::F &p, typename W::F *states) {
        typename W::F &m = states[0];
        const typename W::F apart = W::sub(g, m);
        p = W::fma(c.neg_step_size, W::sign(W::fma(c.one_minus_beta1, apart, m)), W::mul(p, c.decay));
        m = W::fma(c.one_minus_beta2, apart, m);
    }
};

enum class Momentum { kNone, kPlain, kNesterov };

// As torch.optim.SGD (Sutskever et al. 2013 for Nesterov's):
//     g = fma(l2, p, g)
//     b = fma(momentum, b, (1 - dampening) * g)      the first step: without dampening
//     g = b                                          plain momentum
//     g = fma(momentum, b, g)                        Nesterov
//     p = fma(-lr, g, p)
template <Momentum kMomentum>
struct SgdRule {
    static constexpr int kStates = kMomentum == Momentum::kNone ? 0 : 1, kSigned = kStates;
    static double step_size(const zo_segment &s) { return s.lr; }
    template <class W>
    static void step(const Lanes<W> &c, typename W::F g, typename W::F &p, typename W::F *states) {
        g = W::fma(c.l2, p, g);
        if (kMomentum != Momentum::kNone) {
            states[0] = W::fma(c.beta1, states[0], W::mul(c.grad_share, g));
            g = kMomentum == Momentum::kPlain ? states[0] : W::fma(c.beta1, states[0], g);
        }
        p = W::fma(c.neg_step_size, g, p);
    }
};

using AdamW = AdamRule<Decay::kDecoupled, false>;
using AdamWAmsgrad = AdamRule<Decay::kDecoupled, true>;
using Adam = AdamRule<Decay::kL2, false>;
using AdamAmsgrad = AdamRule<Decay::kL2, true>;
using Sgd = SgdRule<Momentum::kNone>;
using SgdMomentum = SgdRule<Momentum::kPlain>;
using SgdNesterov = SgdRule<Momentum::kNesterov>;

// Every rule, in the order of zo_rule, for the rows of a table.
#define ZO_RULES(Row)                                                                        \
    {Row(AdamW),    Row(AdamWAmsgrad), Row(Adam),        Row(AdamAmsgrad), Row(AdagradRule), \
     Row(LionRule), Row(Sgd),          Row(SgdMomentum), Row(SgdNesterov)}
#define ZO_COUNT(Rule) Rule::kStates
#define ZO_STEP_SIZE(Rule) Rule::step_size

constexpr int kNumStates[] = ZO_RULES(ZO_COUNT);
static_assert(sizeof(kNumStates) / sizeof(int) == ZO_NUM_RULES, "one row of ZO_RULES for each zo_rule");
constexpr double (*kStepSize[])(const zo_segment &) = ZO_RULES(ZO_STEP_SIZE);

#undef ZO_STEP_SIZE
#undef ZO_COUNT

inline UpdateScalars scalars_of(uint32_t rule, const zo_segment &s) {
    const double bias2 = 1.0 - std::pow(s.beta2, double(s.step));
    UpdateScalars c;
    c.grad_scale = float(s.grad_scale);
    c.decay = float(1.0 - s.lr * s.weight_decay);
    c.l2 = float(s.weight_decay);
    c.beta1 = float(s.beta1);
    c.beta2 = float(s.beta2);
    c.one_minus_beta1 = float(1.0 - s.beta1);
    c.one_minus_beta2 = float(1.0 - s.beta2);
    c.inv_sqrt_bias2 = float(1.0 / std::sqrt(bias2));
    c.eps = float(s.eps);
    c.neg_step_size = float(-kStepSize[rule](s));
    c.grad_share = s.step == 1 ? 1.0f : float(1.0 - s.beta2);
    c.first_sum = s.step == 1 ? float(s.beta2) : 0.0f;
    c.key[0] = c.key[1] = 0;
    return c;
}

}  // namespace
}  // namespace zo
