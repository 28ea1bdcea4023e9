//! Arithmetic of the results: validity of rounds, medians and intervals.

use std::ops::RangeInclusive;

/// Limit of the machine's time in use by others. A round above it is void.
pub const FOREIGN_MAX: f64 = 0.05;
/// Resamples of the bootstrap: enough for two digits of a quantile of 2.5 %.
const RESAMPLES: usize = 2000;

/// Consecutive samples: the costs of Strait, or a variant of it, and of a peer, in order.
#[derive(Clone, Debug)]
pub struct Turn {
    pub strait: Vec<f64>,
    pub peer: Vec<f64>,
}

/// Results of one round.
#[derive(Clone, Debug)]
pub struct Round {
    pub turns: Vec<Turn>,
    /// Share of the machine's time used by neither the gateways nor the load.
    pub foreign: f64,
}

/// Valid round, or the reason why it is void.
pub type ValidatedRound = Result<Round, String>;

/// Median of some figures, and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Results of a row.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Medians over the turns of all valid rounds; none without a valid round.
    pub costs: Option<Costs>,
    pub valid: usize,
    pub rounds: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Costs {
    pub strait: f64,
    pub peer: f64,
    /// Interval of the turns' ratios.
    pub ratio: Interval,
}

/// Limit of Strait's cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Fraction of the peer's cost in the same run.
    Ratio(f64),
    /// Cost in the row's own unit.
    Absolute(f64),
    /// No limit; the figure is informative.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Miss,
    /// Too few rounds are valid.
    Void,
}

impl Turn {
    /// Returns Strait's cost as a fraction of the peer's.
    pub fn ratio(&self) -> f64 {
        mean(&self.strait) / mean(&self.peer)
    }
}

impl Round {
    /// Returns Strait's cost as a fraction of the peer's.
    pub fn ratio(&self) -> f64 {
        self.middle(|turn| Some(turn.ratio())).unwrap_or(f64::NAN)
    }

    /// Returns the round if it is valid: the two samples of each gateway agree, and the machine was
    /// otherwise idle.
    pub fn validate(
        self,
        [strait, peer]: [&str; 2],
        control: &RangeInclusive<f64>,
    ) -> ValidatedRound {
        for (name, pair) in [
            (strait, self.middle(|turn| pair(&turn.strait))),
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

    /// Subtracts a baseline from the costs of each turn: the mean of its samples.
    ///
    /// # Errors
    /// A cost is not above its baseline, so that there is no ratio.
    pub fn above(mut self, baselines: &[Vec<f64>]) -> ValidatedRound {
        for (turn, baseline) in self.turns.iter_mut().zip(baselines) {
            let baseline = mean(baseline);
            for samples in [&mut turn.strait, &mut turn.peer] {
                samples.iter_mut().for_each(|sample| *sample -= baseline);
                if mean(samples) <= 0.0 {
                    return Err("nothing was added".to_owned());
                }
            }
        }
        Ok(self)
    }

    /// Returns the median of a figure of the turns.
    fn middle(&self, figure: impl Fn(&Turn) -> Option<f64>) -> Option<f64> {
        let figures: Vec<f64> = self.turns.iter().filter_map(figure).collect();
        (!figures.is_empty()).then(|| median(&figures))
    }
}

/// Returns the ratio of the second sample of a turn to the first; none if there is only one.
fn pair(samples: &[f64]) -> Option<f64> {
    match samples {
        [first, second] => Some(second / first),
        _ => None,
    }
}

impl Summary {
    pub fn of(rounds: &[ValidatedRound]) -> Self {
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

    /// Judges the median, if at least half of the rounds are valid.
    pub fn verdict(&self, bar: Limit) -> Verdict {
        let Some(costs) = self.costs.filter(|_| 2 * self.valid >= self.rounds) else {
            return Verdict::Void;
        };
        match bar.as_ratio(&costs) {
            Some(most) if costs.ratio.median > most => Verdict::Miss,
            _ => Verdict::Ok,
        }
    }
}

impl Limit {
    /// Returns the limit as a fraction of the peer's cost, if there is a limit.
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

/// Returns the middle value, or the mean of the two middle ones.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

/// Returns the median and its 95 % interval by the bootstrap: the medians of repeated samples of
/// the same size. The seed is fixed, so that the same figures give the same interval.
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
