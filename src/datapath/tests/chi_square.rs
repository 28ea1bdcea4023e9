//! Pearson's chi-square test.

/// Expected count below which bins are merged: the distribution holds for large counts only.
const EXPECTED_MIN: f64 = 5.0;

/// Returns the probability that counts deviate this much or more from the expected ones by chance.
///
/// Each bin is an expected and an observed count. The result is 0 if an impossible event was
/// observed.
pub(crate) fn p_value(bins: &[(f64, f64)]) -> f64 {
    let is_small = |&(expected, _): &&(f64, f64)| *expected < EXPECTED_MIN;
    let (small, large): (Vec<_>, Vec<_>) = bins.iter().partition(is_small);
    if small.iter().any(|&&(expected, count)| expected == 0.0 && count > 0.0) {
        return 0.0;
    }
    let rest = small.iter().fold((0.0, 0.0), |sum, bin| (sum.0 + bin.0, sum.1 + bin.1));
    let mut bins: Vec<_> = large.into_iter().copied().collect();
    // A rest that is small, too, joins the smallest of the other bins.
    let smallest = bins.iter_mut().min_by(|one, other| one.0.total_cmp(&other.0));
    match smallest.filter(|_| rest.0 < EXPECTED_MIN) {
        Some(smallest) => *smallest = (smallest.0 + rest.0, smallest.1 + rest.1),
        None => bins.extend((rest.0 > 0.0).then_some(rest)),
    }
    let freedom = bins.len().saturating_sub(1);
    if freedom == 0 {
        return 1.0;
    }
    let distance = |&(expected, count): &(f64, f64)| (count - expected).powi(2) / expected;
    let statistic: f64 = bins.iter().map(distance).sum();
    let freedom = f64::from(u32::try_from(freedom).expect("few bins"));
    upper_gamma(freedom / 2.0, statistic / 2.0)
}

/// Computes the regularised upper incomplete gamma function Q(a, x) (DLMF 8.2.4). Uses the series
/// of its complement (8.7.1) where that converges fast, else the continued fraction (8.9.2),
/// evaluated by Lentz's method.
fn upper_gamma(a: f64, x: f64) -> f64 {
    const TERMS: u32 = 10_000;
    if x <= 0.0 {
        return 1.0;
    }
    let scale = (a * x.ln() - x - log_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum) = (1.0 / a, 1.0 / a);
        for n in 1..TERMS {
            term *= x / (a + f64::from(n));
            sum += term;
            if term < sum * f64::EPSILON {
                break;
            }
        }
        return 1.0 - scale * sum;
    }
    let tiny = f64::MIN_POSITIVE / f64::EPSILON;
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1.0 / tiny, 1.0 / b);
    let mut fraction = d;
    for n in 1..TERMS {
        let n = f64::from(n);
        let step = n * (a - n);
        b += 2.0;
        d = 1.0 / not_zero(step * d + b, tiny);
        c = not_zero(b + step / c, tiny);
        fraction *= c * d;
        if (c * d - 1.0).abs() < f64::EPSILON {
            break;
        }
    }
    scale * fraction
}

fn not_zero(of: f64, tiny: f64) -> f64 {
    if of.abs() < tiny { tiny } else { of }
}

/// Computes ln Γ(a) for multiples of one half, by Γ(a + 1) = a Γ(a) (DLMF 5.5.1).
fn log_gamma(a: f64) -> f64 {
    let (mut rest, mut sum) = (a, 0.0);
    while rest > 1.0 {
        rest -= 1.0;
        sum += rest.ln();
    }
    if rest < 0.75 { sum + std::f64::consts::PI.sqrt().ln() } else { sum }
}

#[test]
fn the_tails_are_those_of_the_tables() {
    // Degrees of freedom, statistic and p from tables of the distribution.
    for (freedom, statistic, p) in [
        (1.0, 3.841_459, 0.05),
        (1.0, 23.928_127, 1e-6),
        (2.0, 13.815_511, 0.001),
        (5.0, 11.070_498, 0.05),
        (10.0, 2.558_212, 0.99),
        (30.0, 50.892_181, 0.01),
        (100.0, 100.0, 0.481_191_68),
    ] {
        let got = upper_gamma(freedom / 2.0, statistic / 2.0);
        assert!((got / p - 1.0).abs() < 1e-5, "{freedom} {statistic}: {got}");
    }
    assert_eq!(p_value(&[(50.0, 50.0), (50.0, 50.0)]), 1.0);
    assert!(p_value(&[(50.0, 30.0), (50.0, 70.0)]) < 1e-4);
    assert_eq!(p_value(&[(100.0, 99.0), (0.0, 1.0)]), 0.0);
}
