//! Schedule of certificate renewals (docs/wire-contract.md 4.3).

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep};

use super::{CertificateEvent, RenewalSignals, report_issued};
use crate::tls::IdentityMaterial;

/// Fraction of a certificate's lifetime after which it is replaced.
const RENEWAL_FRACTION: f64 = 0.5;
/// Random deviation from [`RENEWAL_FRACTION`], as a fraction of the lifetime; gateways that started
/// together thus renew at different times.
const JITTER: f64 = 0.01;
/// Bounds of the first wait after a failure, in seconds. Each further wait is twice as long.
const FIRST_WAIT: (f64, f64) = (0.5, 1.0);
/// Random deviation of a wait, as a fraction of it.
const WAIT_JITTER: f64 = 0.2;
/// Limit of a wait while the certificate is valid.
const WAIT_MAX: Duration = Duration::from_secs(150);
/// Limit of a wait without a valid certificate: no peer is served meanwhile.
const WAIT_MAX_UNSERVED: Duration = Duration::from_secs(15);
/// Minimum time between two requests if the control plane is repeatedly lost and found.
const REQUEST_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// Interval at which the wall clock is read. Timers do not advance while the host is suspended.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct RenewalSchedule {
    /// Expiry of the certificate in force, if it is usable.
    ends: Option<SystemTime>,
    /// Time of the last [`Self::renewed`], if nothing has failed since.
    renewed_at: Option<SystemTime>,
    /// The last wait, if the last request failed.
    wait: Option<Duration>,
}

impl RenewalSchedule {
    /// Returns the time of the next request after a certificate with this validity was issued.
    pub(super) fn issued(
        &mut self,
        start: SystemTime,
        end: SystemTime,
        now: SystemTime,
    ) -> SystemTime {
        let life = end.duration_since(start).unwrap_or_default();
        let due = start + life.mul_f64(jittered(RENEWAL_FRACTION, JITTER));
        self.ends = Some(end);
        if due <= now {
            // Half of the lifetime is over already: immediate requests would never end.
            return self.failed(now);
        }
        self.wait = None;
        due
    }

    /// Records a certificate whose renewal is not scheduled by [`Self::issued`].
    pub(super) fn renewed(&mut self, end: SystemTime, now: SystemTime) {
        (self.ends, self.renewed_at) = (Some(end), Some(now));
    }

    /// Records that the certificate in force is unusable, if `unusable` was notified.
    pub(super) fn take_unusable(&mut self, unusable: &Notify) {
        if pin!(unusable.notified()).enable() {
            self.unusable();
        }
    }

    /// Records that the certificate in force is unusable.
    pub(super) fn unusable(&mut self) {
        self.ends = None;
    }

    /// Returns the time of the next request after a failure. While the certificate is valid,
    /// that is its expiry at the latest.
    pub(super) fn failed(&mut self, now: SystemTime) -> SystemTime {
        // A source that fails soon after each renewal gets as few requests as one that only fails.
        let lasted = self.renewed_at.take().and_then(|at| now.duration_since(at).ok());
        if lasted.zip(self.wait).is_some_and(|(lasted, wait)| lasted > wait) {
            self.wait = None;
        }
        let (low, high) = FIRST_WAIT;
        let first = || Duration::from_secs_f64(low + (high - low) * fastrand::f64());
        let left = self.ends.filter(|end| *end > now);
        let most = left.map_or(WAIT_MAX_UNSERVED, |_| WAIT_MAX);
        let wait = self.wait.map_or_else(first, |wait| (wait * 2).min(most));
        self.wait = Some(wait);
        let due = now + wait.mul_f64(jittered(1.0, WAIT_JITTER)).min(most);
        left.map_or(due, |end| due.min(end))
    }

    /// Waits until the wall clock reaches `due`. Whenever `unusable` is notified meanwhile, a wait
    /// after a failure may end sooner.
    pub(super) async fn wait_until(
        &mut self,
        mut due: SystemTime,
        unusable: &Notify,
        now: &impl Fn() -> SystemTime,
    ) {
        loop {
            tokio::select! {
                () = sleep_until(due, now) => return,
                () = unusable.notified() => {
                    self.unusable();
                    due = due.min(self.failed(now()));
                }
            }
        }
    }
}

/// Returns a random number within `spread` of `middle`.
fn jittered(middle: f64, spread: f64) -> f64 {
    middle + spread * (2.0 * fastrand::f64() - 1.0)
}

/// Waits until the wall clock reaches `due`.
pub(super) async fn sleep_until(due: SystemTime, now: &impl Fn() -> SystemTime) {
    while let Ok(left) = due.duration_since(now()) {
        if left.is_zero() {
            return;
        }
        sleep(left.min(CLOCK_INTERVAL)).await;
    }
}

/// Keeps a certificate up to date; `now` is the wall clock. `initial` serves until the first
/// answer, and `keep` is called with each issued certificate that is in force. A refused one is a
/// failure. After a failure, the wait ends when the control plane is reachable again. Returns when
/// the receiver of `news` is closed.
pub(super) async fn run_renewal<F>(
    initial: Option<Arc<IdentityMaterial>>,
    mut fetch: impl FnMut() -> F,
    keep: impl Fn(&Arc<IdentityMaterial>),
    now: impl Fn() -> SystemTime,
    news: mpsc::Sender<CertificateEvent>,
    signals: &RenewalSignals,
) where
    F: Future<Output = anyhow::Result<Arc<IdentityMaterial>>>,
{
    let mut rotation = RenewalSchedule::default();
    if let Some(material) = initial {
        rotation.renewed(material.valid_until, now());
        // The check below detects a closed receiver.
        let _ = news.send(CertificateEvent::Restored(material)).await;
    }
    loop {
        let requested_at = Instant::now();
        let fetched = fetch().await;
        rotation.take_unusable(&signals.unusable);
        let issued = match fetched {
            Ok(material) => report_issued(&news, &material).await.then_some(material),
            Err(error) => {
                let _ = news.send(CertificateEvent::Failed(error.to_string())).await;
                None
            }
        };
        if news.is_closed() {
            return;
        }
        let due = match &issued {
            Some(material) => {
                keep(material);
                rotation.issued(material.not_before, material.valid_until, now())
            }
            None => rotation.failed(now()),
        };
        let mut returned = pin!(async {
            signals.reachable.notified().await;
            tokio::time::sleep_until(requested_at + REQUEST_INTERVAL_MIN).await;
        });
        tokio::select! {
            () = rotation.wait_until(due, &signals.unusable, &now) => {}
            () = &mut returned, if issued.is_none() => rotation.wait = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;
    use std::ops::RangeInclusive;

    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::tls::tests::samples::{self, leaf_between};
    use crate::tools::dev::Issuer;

    const ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
    const HOUR: Duration = Duration::from_secs(3600);

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_certificate_is_due_at_half_of_its_life_give_or_take_a_hundredth() {
        let mut rotation = RenewalSchedule::default();
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
        let mut rotation = RenewalSchedule::default();
        let now = at(1000);
        rotation.issued(at(1000), at(1_000_000), now);
        let wait = |rotation: &mut RenewalSchedule| {
            let due = rotation.failed(now);
            due.duration_since(now).unwrap().as_secs_f64()
        };
        for round in 0..2 {
            for (failure, base) in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0].iter().enumerate()
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
    fn waits_double_too_if_each_failure_follows_a_renewal_and_begin_anew_after_a_longer_time() {
        let mut rotation = RenewalSchedule::default();
        let mut now = at(1000);
        for base in [1.0, 2.0, 4.0, 8.0, 16.0] {
            rotation.renewed(at(1_000_000), now);
            let due = rotation.failed(now);
            let wait = due.duration_since(now).unwrap().as_secs_f64();
            assert!((0.5 * base * 0.8..=base * 1.2).contains(&wait), "{base}: {wait}");
            now = due;
        }
        rotation.renewed(at(1_000_000), now);
        now += Duration::from_secs(17);
        assert!(rotation.failed(now) <= now + Duration::from_millis(1200));
    }

    #[test]
    fn a_failure_is_tried_again_before_the_certificate_ends_and_then_goes_on() {
        let mut rotation = RenewalSchedule::default();
        rotation.issued(at(1000), at(2000), at(1000));
        for _ in 0..20 {
            assert!(rotation.failed(at(1990)) <= at(2000));
        }
        let due = rotation.failed(at(2000));
        assert!((at(2010)..=at(2015)).contains(&due), "{due:?}");
    }

    #[test]
    fn without_a_valid_certificate_no_wait_is_longer_than_15_seconds() {
        let waits = |rotation: &mut RenewalSchedule, now: SystemTime| -> Vec<f64> {
            let wait = |_| rotation.failed(now).duration_since(now).unwrap();
            (0..100).map(wait).map(|wait| wait.as_secs_f64()).collect()
        };
        let mut never = RenewalSchedule::default();
        let mut expired = RenewalSchedule::default();
        expired.issued(at(1000), at(2000), at(1000));
        waits(&mut expired, at(1500));
        for waits in [waits(&mut never, at(1000)), waits(&mut expired, at(3000))] {
            assert!(waits.iter().all(|wait| *wait <= 15.0), "{waits:?}");
            assert!(waits[50..].iter().all(|wait| *wait >= 12.0), "{waits:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_certificate_is_asked_for_at_once_when_discovery_is_back() {
        let (signals, began) = (RenewalSignals::default(), Instant::now());
        let start = at(1_900_000_000);
        let now = || start + began.elapsed();
        let issuer = issuer();
        let held = Arc::new(material(&issuer, start - 24 * HOUR, 24 * HOUR));
        let is_up = Cell::new(false);
        let request_times = RefCell::new(Vec::new());
        let fetch = || {
            request_times.borrow_mut().push(began.elapsed());
            let up = is_up.get().then(|| material(&issuer, now(), 24 * HOUR));
            async move { up.map(Arc::new).ok_or_else(|| anyhow::anyhow!("no answer")) }
        };
        let (news, mut received) = mpsc::channel(1);
        let listen = async {
            assert!(matches!(received.recv().await, Some(CertificateEvent::Restored(_))));
            // Long enough for the longest waits.
            let fails =
                async { while let Some(CertificateEvent::Failed(_)) = received.recv().await {} };
            assert!(timeout(Duration::from_secs(601), fails).await.is_err());
            let last = request_times.borrow().last().copied().expect("a try");
            assert!(began.elapsed() - last <= Duration::from_secs(15));
            is_up.set(true);
            signals.reachable.notify_one();
            let at_once = timeout(Duration::from_millis(600), received.recv()).await;
            assert!(matches!(at_once, Ok(Some(CertificateEvent::Issued(..)))), "{at_once:?}");
        };
        tokio::select! {
            () = run_renewal(Some(held), fetch, |_| (), now, news, &signals) => {
                panic!("it goes on for ever")
            }
            () = listen => {}
        }
    }

    #[test]
    fn one_that_is_half_over_from_the_start_is_not_asked_for_without_a_pause() {
        let mut rotation = RenewalSchedule::default();
        let mut last = Duration::ZERO;
        for _ in 0..4 {
            let due = rotation.issued(at(1000), at(2000), at(1600));
            let wait = due.duration_since(at(1600)).unwrap();
            assert!(wait >= last.mul_f64(1.2) && wait >= Duration::from_millis(400));
            last = wait;
        }
    }

    fn issuer() -> (Issuer, String) {
        let authority = samples::authority();
        (samples::intermediate(&authority, "east"), authority.root_pem())
    }

    /// Returns a certificate with a lifetime of `life` from `start`.
    fn material(
        (issuer, root): &(Issuer, String),
        start: SystemTime,
        life: Duration,
    ) -> IdentityMaterial {
        samples::material(&leaf_between(issuer, ID, start, start + life), root)
    }

    /// Runs `keep` under a paused clock. `script` has one entry for each request: true if the
    /// authority is up. Afterwards it is up. Returns the times of the requests, in hours, and
    /// for each report whether it was a certificate.
    async fn driven(script: &[bool], hours: u32) -> (Vec<f64>, Vec<bool>) {
        // Certificates have a resolution of one second.
        let (start, began) = (at(1_900_000_000), Instant::now());
        let now = || start + began.elapsed();
        let issuer = issuer();
        let (request_times, script) =
            (RefCell::new(Vec::new()), RefCell::new(VecDeque::from(script.to_vec())));
        let fetch = || {
            request_times.borrow_mut().push(began.elapsed().as_secs_f64() / 3600.0);
            let up = script.borrow_mut().pop_front().unwrap_or(true);
            let got = if up {
                Ok(Arc::new(material(&issuer, now(), 24 * HOUR)))
            } else {
                Err(anyhow::anyhow!("no answer"))
            };
            async { got }
        };
        let (news, mut received) = mpsc::channel(1);
        let mut heard = Vec::new();
        let listen = async {
            while let Some(news) = received.recv().await {
                heard.push(matches!(news, CertificateEvent::Issued(..)));
                if let CertificateEvent::Issued(_, in_force) = news {
                    in_force.send(()).expect("a task that waits");
                }
            }
        };
        let signals = RenewalSignals::default();
        let renewal = run_renewal(None, fetch, |_| (), now, news, &signals);
        let driver = async { tokio::join!(renewal, listen) };
        let ended = timeout(hours * HOUR, driver).await;
        assert!(ended.is_err(), "it goes on for ever");
        (request_times.into_inner(), heard)
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_certificate_is_a_failure_and_one_that_becomes_unusable_is_replaced() {
        let (signals, began) = (RenewalSignals::default(), Instant::now());
        let start = at(1_900_000_000);
        let now = || start + began.elapsed();
        let issuer = issuer();
        let fetch = || {
            let issued = Arc::new(material(&issuer, now(), 24 * HOUR));
            async move { anyhow::Ok(issued) }
        };
        let kept = Cell::new(0);
        let keep = |_: &Arc<IdentityMaterial>| kept.set(kept.get() + 1);
        let (news, mut received) = mpsc::channel(1);
        let listen = async {
            let mut next = async || match received.recv().await {
                Some(CertificateEvent::Issued(_, in_force)) => in_force,
                other => panic!("{other:?}"),
            };
            // Refusals: the waits double, up to that without a certificate.
            let mut last = began.elapsed();
            for refusal in 0..20 {
                drop(next().await);
                let wait = (began.elapsed() - last).as_secs_f64();
                let least = if refusal == 0 { 0.0 } else { (0.2 * 2_f64.powi(refusal)).min(12.0) };
                assert!((least..=15.001).contains(&wait), "{refusal}: {wait}");
                last = began.elapsed();
            }
            assert_eq!(kept.get(), 0);
            next().await.send(()).expect("a task that waits");
            let early = timeout(11 * HOUR, next()).await;
            assert!(early.is_err(), "nothing is requested before half of the life is over");
            assert_eq!(kept.get(), 1);
            signals.unusable.notify_one();
            let at_once = timeout(Duration::from_secs(2), next()).await;
            at_once.expect("a request at once").send(()).expect("a task that waits");
            assert!(timeout(11 * HOUR, next()).await.is_err());
        };
        tokio::select! {
            () = run_renewal(None, fetch, keep, now, news, &signals) => {
                panic!("it goes on for ever")
            }
            () = listen => {}
        }
    }

    #[test]
    fn a_certificate_whose_intermediate_ends_first_is_replaced_before_that() {
        let authority = samples::authority();
        let root = authority.root_pem();
        let now = SystemTime::now();
        let ends = now + Duration::from_secs(10);
        let short = authority.intermediate_with("east", |params| params.not_after = ends.into());
        let leaf = leaf_between(&short.unwrap(), ID, now - HOUR, now + 24 * HOUR);
        let material = samples::material(&leaf, &root).verified(now).unwrap();
        let mut rotation = RenewalSchedule::default();
        let due = rotation.issued(material.not_before, material.valid_until, now);
        assert!(due <= ends, "{due:?}");
        // From its end on, the wait is that without a certificate.
        rotation.wait = Some(WAIT_MAX);
        assert!(rotation.failed(ends + Duration::from_secs(1)) <= ends + Duration::from_secs(16));
    }

    fn assert_in(hours: &[f64], ranges: &[RangeInclusive<f64>]) {
        assert_eq!(hours.len(), ranges.len(), "{hours:?}");
        for (hour, range) in hours.iter().zip(ranges) {
            assert!(range.contains(hour), "{hours:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_of_a_day_are_replaced_twice_a_day() {
        let (request_times, heard) = driven(&[], 40).await;
        assert_in(&request_times, &[0.0..=0.001, 11.7..=12.3, 23.4..=24.6, 35.2..=36.8]);
        assert_eq!(heard, [true; 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_authority_that_is_down_at_half_life_is_asked_until_it_is_back() {
        let mut script = vec![false; 302];
        (script[0], script[1]) = (false, true);
        let (request_times, heard) = driven(&script, 40).await;
        assert!(
            request_times[1] < 0.001,
            "a first failure is tried again at once: {request_times:?}"
        );
        let failures = heard.iter().filter(|issued| !**issued).count();
        assert_eq!(failures, 301);
        // 300 failures and no wait above 150 s: the next request follows within that time after
        // the authority's return.
        let back = request_times[302];
        assert!((11.7 + 8.0..=12.3 + 12.5).contains(&back), "{back}");
        let waits = request_times[3..303].windows(2).map(|pair| (pair[1] - pair[0]) * 3600.0);
        assert!(waits.clone().all(|wait| wait <= 151.0), "{:?}", waits.collect::<Vec<_>>());
        assert!(request_times[303] > back + 11.7, "and then at half life again");
    }
}
