//! The arithmetic: which rounds count, and what they come to.

use std::ops::RangeInclusive;

/// A round with more of the machine's time in other hands says nothing.
pub const FOREIGN_MAX: f64 = 0.05;
/// Resamples of the bootstrap: enough for two digits of a quantile of 2.5 %.
const RESAMPLES: usize = 2000;

/// Samples that follow each other: the costs of Strait and of a peer in their order.
#[derive(Clone, Debug)]
pub struct Turn {
    pub strait: Vec<f64>,
    pub peer: Vec<f64>,
}

/// What one round has measured.
#[derive(Clone, Debug)]
pub struct Round {
    pub turns: Vec<Turn>,
    /// The share of the machine's time that neither the gateways nor the load had.
    pub foreign: f64,
}

/// A round that counts, or why it does not.
pub type Judged = Result<Round, String>;

/// The middle of some figures, and where it lies for 95 of 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// What a row has come to.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Medians over the turns of all rounds that count; none where no round does.
    pub costs: Option<Costs>,
    pub valid: usize,
    pub rounds: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Costs {
    pub strait: f64,
    pub peer: f64,
    /// Of the turns' ratios.
    pub ratio: Interval,
}

/// What Strait may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bar {
    /// As a part of the peer's cost in the same run.
    Ratio(f64),
    /// In the row's own unit.
    Absolute(f64),
    /// The figure is there to be read.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Miss,
    /// Too few rounds count.
    Void,
}

impl Turn {
    /// Strait's cost as a part of the peer's.
    pub fn ratio(&self) -> f64 {
        mean(&self.strait) / mean(&self.peer)
    }
}

impl Round {
    /// Strait's cost as a part of the peer's.
    pub fn ratio(&self) -> f64 {
        self.middle(|turn| Some(turn.ratio())).unwrap_or(f64::NAN)
    }

    /// Whether it counts: the two samples of each gateway agree, and nobody else was busy.
    pub fn judged(self, peer: &str, control: &RangeInclusive<f64>) -> Judged {
        for (name, pair) in [
            ("Strait", self.middle(|turn| pair(&turn.strait))),
            (peer, self.middle(|turn| pair(&turn.peer))),
        ] {
            if let Some(pair) = pair.filter(|pair| !control.contains(pair)) {
                return Err(format!("control pair of {name}: {pair:.2}"));
            }
        }
        if self.foreign > FOREIGN_MAX {
            return Err(format!("foreign CPU: {:.0} %", 100.0 * self.foreign));
        }
        Ok(self)
    }

    /// The median of a figure of the turns.
    fn middle(&self, figure: impl Fn(&Turn) -> Option<f64>) -> Option<f64> {
        let figures: Vec<f64> = self.turns.iter().filter_map(figure).collect();
        (!figures.is_empty()).then(|| median(&figures))
    }
}

/// The second sample of a turn as a part of the first one; none where there is one alone.
fn pair(samples: &[f64]) -> Option<f64> {
    match samples {
        [first, second] => Some(second / first),
        _ => None,
    }
}

impl Summary {
    pub fn of(rounds: &[Judged]) -> Self {
        let valid = rounds.iter().flatten();
        let turns: Vec<&Turn> = valid.clone().flat_map(|round| &round.turns).collect();
        let of =
            |cost: fn(&Turn) -> f64| -> Vec<f64> { turns.iter().map(|&turn| cost(turn)).collect() };
        Self {
            costs: (!turns.is_empty()).then(|| Costs {
                strait: median(&of(|turn| mean(&turn.strait))),
                peer: median(&of(|turn| mean(&turn.peer))),
                ratio: interval(&of(Turn::ratio)),
            }),
            valid: valid.count(),
            rounds: rounds.len(),
        }
    }

    /// By the median, where at least half of the rounds count.
    pub fn verdict(&self, bar: Bar) -> Verdict {
        let Some(costs) = self.costs.filter(|_| 2 * self.valid >= self.rounds) else {
            return Verdict::Void;
        };
        match bar.as_ratio(&costs) {
            Some(most) if costs.ratio.median > most => Verdict::Miss,
            _ => Verdict::Ok,
        }
    }
}

impl Bar {
    /// Where the bar lies beside the peer's cost, if there is one.
    pub fn as_ratio(self, costs: &Costs) -> Option<f64> {
        match self {
            Self::Ratio(ratio) => Some(ratio),
            Self::Absolute(cost) => Some(cost / costs.peer),
            Self::None => None,
        }
    }
}

fn mean(figures: &[f64]) -> f64 {
    figures.iter().sum::<f64>() / figures.len() as f64
}

/// The middle one, or the mean of both.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[half]
    } else {
        f64::midpoint(sorted[half - 1], sorted[half])
    }
}

/// The median, and its 95 % interval by the bootstrap: the medians of as many figures, drawn again
/// and again. The seed is fixed, so that the same figures give the same interval.
pub fn interval(figures: &[f64]) -> Interval {
    let mut random = fastrand::Rng::with_seed(0);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let draw = |_| figures[random.usize(..figures.len())];
            median(&(0..figures.len()).map(draw).collect::<Vec<_>>())
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    // 2.5 % on each side.
    let outside = RESAMPLES / 40;
    Interval {
        median: median(figures),
        low: medians[outside],
        high: medians[RESAMPLES - 1 - outside],
    }
}
