//! When to ask for the next certificate (contract 4).

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::{IssueError, News};
use crate::tls::Material;

/// A certificate is replaced when this part of its life is over,
const HALF: f64 = 0.5;
/// give or take so much of it, so that gateways that started together do not ask together.
const JITTER: f64 = 0.01;
/// The first wait after a failure is between these; each further one is twice as long,
const FIRST_WAIT: (f64, f64) = (0.5, 1.0);
/// give or take this part of it,
const SPREAD: f64 = 0.2;
/// and never longer than this.
const WAIT_MAX: Duration = Duration::from_secs(150);
/// A host that slept has lost time that no timer noticed: the clock is looked at so often.
const LOOK: Duration = Duration::from_secs(60);

/// When the next certificate is due, by what has happened.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    /// When the certificate in force ends.
    ends: Option<SystemTime>,
    /// The last wait after a failure, if the last try failed.
    wait: Option<Duration>,
}

impl Rotation {
    /// When to ask again after a certificate of this validity has come.
    pub(super) fn issued(
        &mut self,
        start: SystemTime,
        end: SystemTime,
        now: SystemTime,
    ) -> SystemTime {
        let life = end.duration_since(start).unwrap_or_default();
        let due = start + life.mul_f64(around(HALF, JITTER));
        self.ends = Some(end);
        if due <= now {
            // One that is half over from the start: asking at once would never end.
            return self.failed(now);
        }
        self.wait = None;
        due
    }

    /// Notes a certificate that others renew.
    pub(super) fn renewed(&mut self, end: SystemTime) {
        (self.ends, self.wait) = (Some(end), None);
    }

    /// When to ask again after a failure: while the certificate lives, not later than it ends.
    pub(super) fn failed(&mut self, now: SystemTime) -> SystemTime {
        let (low, high) = FIRST_WAIT;
        let first = || Duration::from_secs_f64(low + (high - low) * fastrand::f64());
        let wait = self
            .wait
            .map_or_else(first, |wait| (wait * 2).min(WAIT_MAX));
        self.wait = Some(wait);
        let due = now + wait.mul_f64(around(1.0, SPREAD)).min(WAIT_MAX);
        match self.ends {
            Some(end) if end > now => due.min(end),
            _ => due,
        }
    }
}

/// A random number as near to the middle as `spread`.
fn around(middle: f64, spread: f64) -> f64 {
    middle + spread * (2.0 * fastrand::f64() - 1.0)
}

/// Waits until the clock says `due`.
pub(super) async fn sleep_until(due: SystemTime, now: &impl Fn() -> SystemTime) {
    while let Ok(left) = due.duration_since(now()) {
        if left.is_zero() {
            return;
        }
        sleep(left.min(LOOK)).await;
    }
}

/// Keeps a certificate by asking for the next one in time; `now` is the clock. Ends when nobody
/// wants to know any more.
pub(super) async fn keep<F>(
    mut fetch: impl FnMut() -> F,
    now: impl Fn() -> SystemTime,
    news: mpsc::Sender<News>,
) where
    F: Future<Output = Result<Material, IssueError>>,
{
    let mut rotation = Rotation::default();
    loop {
        let (due, told) = match fetch().await {
            Ok(material) => {
                let end = material.identity.not_after;
                let due = rotation.issued(material.not_before, end, now());
                (due, News::Issued(Arc::new(material)))
            }
            Err(error) => (rotation.failed(now()), News::Failed(error.to_string())),
        };
        if news.send(told).await.is_err() {
            return;
        }
        sleep_until(due, &now).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::ops::RangeInclusive;

    use rcgen::SanType;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::tls::dev::{Authority, Issuer};

    const ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
    const HOUR: Duration = Duration::from_secs(3600);

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_certificate_is_due_at_half_of_its_life_give_or_take_a_hundredth() {
        let mut rotation = Rotation::default();
        let (mut low, mut high) = (f64::MAX, f64::MIN);
        for _ in 0..1000 {
            let due = rotation.issued(at(1000), at(11_000), at(1100));
            let part = due.duration_since(at(1000)).unwrap().as_secs_f64() / 10_000.0;
            (low, high) = (low.min(part), high.max(part));
        }
        assert!((0.49..0.493).contains(&low), "{low}");
        assert!((0.507..=0.51).contains(&high), "{high}");
    }

    #[test]
    fn waits_after_failures_double_up_to_a_bound_and_begin_anew_after_a_success() {
        let mut rotation = Rotation::default();
        let now = at(1000);
        let wait = |rotation: &mut Rotation| {
            let due = rotation.failed(now);
            due.duration_since(now).unwrap().as_secs_f64()
        };
        for round in 0..2 {
            for (failure, base) in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
                .iter()
                .enumerate()
            {
                let wait = wait(&mut rotation);
                let range = 0.5 * base * 0.8..=(1.0_f64 * base * 1.2).min(150.0);
                assert!(range.contains(&wait), "{round}: {failure}: {wait}");
            }
            for _ in 0..100 {
                let wait = wait(&mut rotation);
                assert!((51.0..=150.0).contains(&wait), "{wait}");
            }
            rotation.issued(at(1000), at(1_000_000), now);
        }
    }

    #[test]
    fn a_failure_is_tried_again_before_the_certificate_ends_and_then_goes_on() {
        let mut rotation = Rotation::default();
        rotation.issued(at(1000), at(2000), at(1000));
        for _ in 0..20 {
            assert!(rotation.failed(at(1990)) <= at(2000));
        }
        assert!(
            rotation.failed(at(2000)) > at(2050),
            "the wait is long by now"
        );
    }

    #[test]
    fn one_that_is_half_over_from_the_start_is_not_asked_for_without_a_pause() {
        let mut rotation = Rotation::default();
        let mut last = Duration::ZERO;
        for _ in 0..4 {
            let due = rotation.issued(at(1000), at(2000), at(1600));
            let wait = due.duration_since(at(1600)).unwrap();
            assert!(wait >= last.mul_f64(1.2) && wait >= Duration::from_millis(400));
            last = wait;
        }
    }

    fn issuer() -> (Issuer, String) {
        let authority = Authority::new().unwrap();
        (
            authority.intermediate("east").unwrap(),
            authority.root_pem(),
        )
    }

    /// A certificate that lives for so long from `start` on.
    fn material((issuer, root): &(Issuer, String), start: SystemTime, life: Duration) -> Material {
        let leaf = issuer.leaf_with(|params| {
            params.subject_alt_names = vec![SanType::URI(ID.try_into().unwrap())];
            params.not_before = start.into();
            params.not_after = (start + life).into();
        });
        let leaf = leaf.unwrap();
        Material::from_pem(&leaf.chain_pem, &leaf.key_pem, root).unwrap()
    }

    /// Lets the driver run under a paused clock, with an authority that is up or down as `script`
    /// says, one entry for each time that it is asked, and up afterwards. Gives the times at which
    /// it was asked, in hours, and what was told.
    async fn driven(script: &[bool], hours: u32) -> (Vec<f64>, Vec<bool>) {
        // Certificates have whole seconds.
        let (start, began) = (at(1_900_000_000), Instant::now());
        let now = || start + began.elapsed();
        let issuer = issuer();
        let (asked, script) = (
            RefCell::new(Vec::new()),
            RefCell::new(VecDeque::from(script.to_vec())),
        );
        let fetch = || {
            asked
                .borrow_mut()
                .push(began.elapsed().as_secs_f64() / 3600.0);
            let up = script.borrow_mut().pop_front().unwrap_or(true);
            let got = match up {
                true => Ok(material(&issuer, now(), 24 * HOUR)),
                false => Err(IssueError::Late),
            };
            async { got }
        };
        let (news, mut told) = mpsc::channel(1);
        let mut heard = Vec::new();
        let listen = async {
            while let Some(news) = told.recv().await {
                heard.push(matches!(news, News::Issued(_)));
            }
        };
        let driver = async { tokio::join!(keep(fetch, now, news), listen) };
        let ended = timeout(hours * HOUR, driver).await;
        assert!(ended.is_err(), "it goes on for ever");
        (asked.into_inner(), heard)
    }

    fn assert_in(hours: &[f64], ranges: &[RangeInclusive<f64>]) {
        assert_eq!(hours.len(), ranges.len(), "{hours:?}");
        for (hour, range) in hours.iter().zip(ranges) {
            assert!(range.contains(hour), "{hours:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_of_a_day_are_replaced_twice_a_day() {
        let (asked, heard) = driven(&[], 40).await;
        assert_in(
            &asked,
            &[0.0..=0.001, 11.7..=12.3, 23.4..=24.6, 35.2..=36.8],
        );
        assert_eq!(heard, [true; 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_authority_that_is_down_at_half_life_is_asked_until_it_is_back() {
        let mut script = vec![false; 302];
        (script[0], script[1]) = (false, true);
        let (asked, heard) = driven(&script, 40).await;
        assert!(
            asked[1] < 0.001,
            "a first failure is tried again at once: {asked:?}"
        );
        let failures = heard.iter().filter(|issued| !**issued).count();
        assert_eq!(failures, 301);
        // 300 failures and no wait above 150 s: it is asked again within that of its return.
        let back = asked[302];
        assert!((11.7 + 8.0..=12.3 + 12.5).contains(&back), "{back}");
        let waits = asked[3..303]
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) * 3600.0);
        assert!(
            waits.clone().all(|wait| wait <= 151.0),
            "{:?}",
            waits.collect::<Vec<_>>()
        );
        assert!(asked[303] > back + 11.7, "and then at half life again");
    }
}
