//! Endpoint, and its live state, which outlives a snapshot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::RemoteGateway;
use super::expiring::Expiring;
use super::mesh::{Protocol, Workload};
use super::recent_sources::{RecentSources, SourceHash};
use crate::status::WorkloadLabels;
use crate::wire::ServiceLoad;

/// Address and port of a workload, as the data path dials it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address to dial: `ip:15008` for a workload with HBONE, otherwise the target port.
    pub address: SocketAddr,
    pub protocol: Protocol,
    /// Weight; never 0 in an [`EndpointSet`](super::EndpointSet).
    pub weight: u32,
    /// Workload as received from the source when the endpoint was built.
    pub definition: Arc<Workload>,
    /// Gateway whose HBONE port `address` is, if the endpoint represents the instances of a service
    /// in another network.
    pub remote: Option<Arc<RemoteGateway>>,
    /// State that outlives the snapshot.
    pub state: Arc<EndpointState>,
}

/// Live state of an endpoint: load and passive health. It belongs to one workload at one address,
/// so a new pod that reuses an address starts fresh.
#[derive(Debug)]
pub struct EndpointState {
    in_flight: AtomicU32,
    consecutive_ejections: AtomicU16,
    /// Mean dial time, in units of [`DIAL_UNIT_MICROS`]; 0 before the first dial.
    mean_dial: AtomicU16,
    /// Milliseconds of waits for an answer in vain since the last answer.
    silent_millis: AtomicU32,
    /// Milliseconds after `epoch` until which the endpoint is ejected, above the bits of the
    /// cause. 0 means never.
    ejected_until: AtomicU64,
    sources: RecentSources,
    /// Capacity that a gateway of another network has advertised as free, in hundredths.
    free_capacity: Expiring,
    /// Factor of the weight by the round trip time of that gateway.
    share: Expiring,
    epoch: Instant,
}

/// Bits of a cause in `ejected_until`.
const CAUSE_BITS: u32 = 3;
const CAUSE_MASK: u64 = (1 << CAUSE_BITS) - 1;
/// The endpoint was not judged.
const SUSPENDED: u64 = 0;
/// A dial decides whether it stays ejected.
const PROBED: u64 = 1;
const DIAL: u64 = 2;
/// A tunnel failed after its dial.
const TUNNEL: u64 = 3;
/// A dial, and then its tunnel, decide whether it stays ejected after a failed tunnel.
const PROBED_TUNNEL: u64 = 4;

/// Time for which an endpoint leaves the draw while one tunnel tries it after its ejection. It
/// covers the dial and the deadline for the first answer.
const PROBE_TIME: Duration = Duration::from_secs(8);

/// Divisor of the moving mean of advertised capacities. One per second counts, by a quarter, so
/// that the mean follows a change within about ten seconds.
const CAPACITY_MEAN_DIVISOR: u64 = 4;

/// Limit of the factor by which advertised loads raise a weight, or its inverse reduces it.
pub(super) const FACTOR_MAX: u32 = 4;

/// Duration of the first ejection; each further one doubles it.
const EJECTION_FIRST: Duration = Duration::from_secs(5);
const EJECTION_MAX: Duration = Duration::from_secs(5 * 60);

/// Unit of the mean dial time, in microseconds. The longest dial, two seconds, fits into 16 bits: 2
/// s / 32 µs = 62,500.
const DIAL_UNIT_MICROS: u32 = 32;
/// Divisor of the moving mean: a dial counts an eighth. The mean follows an endpoint that becomes
/// slower or faster within about twenty dials.
const DIAL_MEAN_DIVISOR: u16 = 8;

impl Default for EndpointState {
    /// Returns the state of an endpoint that was never dialled.
    fn default() -> Self {
        Self {
            in_flight: AtomicU32::new(0),
            consecutive_ejections: AtomicU16::new(0),
            mean_dial: AtomicU16::new(0),
            silent_millis: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            sources: RecentSources::default(),
            free_capacity: Expiring::default(),
            share: Expiring::default(),
            epoch: Instant::now(),
        }
    }
}

impl EndpointState {
    /// Returns the number of tunnels that are open or being opened to the endpoint.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns whether the endpoint was ever ejected, a cheap precondition for
    /// [`Self::is_ejected`].
    pub fn was_ejected(&self) -> bool {
        self.ejected_until.load(Ordering::Relaxed) != 0
    }

    pub fn is_ejected(&self, now: Instant) -> bool {
        self.millis(now) < self.ejected_until.load(Ordering::Relaxed) >> CAUSE_BITS
    }

    /// Returns whether the endpoint is ejected at `now` without a judgement: by [`Self::suspend`],
    /// or while a tunnel tries it again.
    pub fn is_suspended(&self, now: Instant) -> bool {
        let until = self.ejected_until.load(Ordering::Relaxed);
        matches!(until & CAUSE_MASK, SUSPENDED | PROBED | PROBED_TUNNEL) && self.is_ejected(now)
    }

    /// Returns whether an ejection has ended by `now` and no dial has succeeded since.
    pub fn is_on_probation(&self, now: Instant) -> bool {
        let until = self.ejected_until.load(Ordering::Relaxed);
        until & CAUSE_MASK != SUSPENDED && !self.is_ejected(now)
    }

    /// Returns the remaining time of the ejection, if the endpoint is ejected at `now`.
    pub fn ejected_for(&self, now: Instant) -> Option<Duration> {
        let until = self.ejected_until.load(Ordering::Relaxed) >> CAUSE_BITS;
        let left = until.saturating_sub(self.millis(now));
        (left > 0).then_some(Duration::from_millis(left))
    }

    /// Ejects the endpoint after a failed dial and returns the duration: 5 s at first, doubling
    /// with each ejection up to 5 min.
    pub fn eject(&self, now: Instant) -> Duration {
        self.eject_for(DIAL, now)
    }

    /// Ejects the endpoint, as [`Self::eject`] does, after a tunnel that failed once it was
    /// dialled. A dial that succeeds does not end the ejection.
    pub fn eject_for_tunnel(&self, now: Instant) -> Duration {
        self.eject_for(TUNNEL, now)
    }

    fn eject_for(&self, cause: u64, now: Instant) -> Duration {
        let more = |strikes: u16| Some(strikes.saturating_add(1));
        let strikes = self
            .consecutive_ejections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .unwrap_or_default();
        let time = EJECTION_FIRST.saturating_mul(1 << strikes.min(16)).min(EJECTION_MAX);
        let until = self.millis(now + time) << CAUSE_BITS | cause;
        self.ejected_until.store(until, Ordering::Relaxed);
        time
    }

    /// Ejects the endpoint for a time, which does not make later ejections longer, unless it is
    /// ejected. Returns true if it was not.
    pub fn suspend(&self, now: Instant, time: Duration) -> bool {
        self.update_ejection(|before| {
            let is_over = before >> CAUSE_BITS <= self.millis(now);
            is_over.then(|| self.millis(now + time) << CAUSE_BITS)
        })
    }

    /// Notes that a tunnel is about to dial the endpoint. After an ejection, the endpoint leaves
    /// the draw until that tunnel has shown whether it has recovered.
    pub fn begin_dial(&self, now: Instant) {
        if !self.was_ejected() {
            return;
        }
        self.update_ejection(|before| {
            let (until, probe) = (before >> CAUSE_BITS, self.millis(now + PROBE_TIME));
            let is_over = until <= self.millis(now);
            match before & CAUSE_MASK {
                DIAL => Some(until.max(probe) << CAUSE_BITS | PROBED),
                TUNNEL if is_over => Some(probe << CAUSE_BITS | PROBED_TUNNEL),
                _ => None,
            }
        });
    }

    /// Ends the ejection after a failed dial. The next tunnel tries the endpoint alone.
    pub fn end_ejection(&self, now: Instant) {
        self.update_ejection(|before| {
            let is_failed_dial = before & CAUSE_MASK == DIAL;
            is_failed_dial.then(|| {
                let until = (before >> CAUSE_BITS).min(self.millis(now));
                until << CAUSE_BITS | DIAL
            })
        });
    }

    /// Returns true if `change` has returned a new value of `ejected_until`.
    fn update_ejection(&self, change: impl FnMut(u64) -> Option<u64>) -> bool {
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        self.ejected_until.fetch_update(set, fetch, change).is_ok()
    }

    /// Records a source whose dial has succeeded.
    pub fn record_source(&self, source: SourceHash, now: Instant) {
        self.sources.record(source, self.millis(now) / 1000);
    }

    /// Records a tunnel of a source that failed after its dial. Returns true if the endpoint is to
    /// blame, because one source alone could have provoked it otherwise.
    pub fn is_to_blame(&self, source: SourceHash, now: Instant) -> bool {
        self.sources.is_to_blame(source, self.millis(now) / 1000)
    }

    /// Adds a wait in vain for the first answer in a tunnel. Returns the sum of such waits since
    /// the last answer in any tunnel.
    pub fn add_silence(&self, time: Duration) -> Duration {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let before = self.silent_millis.fetch_add(millis, Ordering::Relaxed);
        Duration::from_millis(u64::from(before.saturating_add(millis)))
    }

    pub fn record_answer(&self) {
        if self.silent_millis.load(Ordering::Relaxed) != 0 {
            self.silent_millis.store(0, Ordering::Relaxed);
        }
    }

    /// Records the duration of a successful dial, which ends an ejection because of failed ones.
    pub fn record_dial(&self, time: Duration) {
        if self.was_ejected() {
            self.update_ejection(|before| match before & CAUSE_MASK {
                PROBED => Some(0),
                PROBED_TUNNEL => Some(before & !CAUSE_MASK | SUSPENDED),
                _ => None,
            });
        }
        let units = time.as_micros() / u128::from(DIAL_UNIT_MICROS);
        let units = u16::try_from(units).unwrap_or(u16::MAX).max(1);
        let mean = match self.mean_dial.load(Ordering::Relaxed) {
            0 => units,
            mean => mean - mean / DIAL_MEAN_DIVISOR + units / DIAL_MEAN_DIVISOR,
        };
        // The update is not atomic: of two concurrent dials, one may be lost.
        self.mean_dial.store(mean.max(1), Ordering::Relaxed);
    }

    /// Returns the mean dial time in milliseconds, rounded up, at least 1 because less is noise. An
    /// endpoint that was never dialled has 1, so that it gets dialled.
    pub fn mean_dial_millis(&self) -> u32 {
        let micros = u32::from(self.mean_dial.load(Ordering::Relaxed)) * DIAL_UNIT_MICROS;
        micros.div_ceil(1000).max(1)
    }

    /// Records the load of the service that the gateway of another network has advertised. The
    /// first one of a second counts.
    pub fn record_load(&self, load: ServiceLoad, now: Instant) {
        let second = self.millis(now) / 1000;
        let capacity = u64::from(load.ready) * u64::from(load.free_percent);
        let mean = match self.free_capacity.get(second) {
            Some((_, 0)) => return,
            Some((mean, _)) => {
                let weighted = u64::from(mean) * (CAPACITY_MEAN_DIVISOR - 1) + capacity;
                weighted.div_ceil(CAPACITY_MEAN_DIVISOR)
            }
            None => capacity,
        };
        self.free_capacity.set(u32::try_from(mean).unwrap_or(u32::MAX), second);
    }

    /// Returns the mean of the capacities that were advertised as free, in hundredths, unless it
    /// has expired.
    pub fn free_capacity(&self, now: Instant) -> Option<u32> {
        let (mean, _) = self.free_capacity.get(self.millis(now) / 1000)?;
        Some(mean)
    }

    /// Records the factor of the weight by the round trip time of the gateway of another network.
    pub fn record_share(&self, share: u32, now: Instant) {
        self.share.set(share, self.millis(now) / 1000);
    }

    /// Returns the factor of the weight by the round trip time of the gateway, unless it has
    /// expired.
    pub fn share(&self, now: Instant) -> Option<u32> {
        let (share, _) = self.share.get(self.millis(now) / 1000)?;
        Some(share)
    }

    /// Forgets earlier failures after the endpoint has served.
    ///
    /// Does nothing while the endpoint is ejected: the tunnel that served may be older than its
    /// failure.
    pub fn restore(&self, now: Instant) {
        if self.consecutive_ejections.load(Ordering::Relaxed) != 0 && !self.is_ejected(now) {
            self.consecutive_ejections.store(0, Ordering::Relaxed);
        }
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_millis()).unwrap_or(u64::MAX)
    }
}

impl Endpoint {
    /// Returns the unique id of the workload.
    pub fn uid(&self) -> &Arc<str> {
        &self.definition.uid
    }

    /// Returns the authority of the service at the gateway of another network; `None` for an
    /// endpoint of the own network. An alias of several services has endpoints of each.
    pub fn remote_authority(&self) -> Option<String> {
        self.remote.as_ref()?;
        let (service, ports) = self.definition.services.iter().next()?;
        let (_, host) = service.split_once('/')?;
        let port = ports.keys().next()?;
        Some(format!("{host}:{port}"))
    }

    /// Records the load that the gateway of another network has advertised, at most as much as can
    /// change the weight. A larger one would hide what the gateway advertises next.
    pub fn record_load(&self, load: ServiceLoad, now: Instant) {
        let most = self.definition.capacity.saturating_mul(FACTOR_MAX);
        let ready = match load.free_percent {
            0 => 0,
            percent => load.ready.min(most.saturating_mul(100) / percent),
        };
        self.state.record_load(ServiceLoad { ready, ..load }, now);
    }

    /// Returns the labels of its workload in metrics and logs.
    pub fn labels(&self) -> &Arc<WorkloadLabels> {
        self.definition.labels()
    }
}

/// Share of a tunnel in an endpoint's load, released on drop.
#[derive(Debug)]
pub struct InFlight(Arc<EndpointState>);

impl InFlight {
    /// Counts one more tunnel on the endpoint.
    pub fn new(state: &Arc<EndpointState>) -> Self {
        state.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(state))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ejections_double_from_5_seconds_to_5_minutes_and_end() {
        let state = EndpointState::default();
        let mut times = Vec::new();
        for _ in 0..8 {
            let now = Instant::now();
            let time = state.eject(now);
            times.push(time.as_secs());
            assert!(state.is_ejected(now) && !state.is_ejected(now + time));
            assert_eq!(state.ejected_for(now), Some(time));
            assert_eq!(state.ejected_for(now + time), None);
        }
        assert_eq!(times, [5, 10, 20, 40, 80, 160, 300, 300]);
        state.consecutive_ejections.store(u16::MAX, Ordering::Relaxed);
        state.eject(Instant::now());
        assert_eq!(state.eject(Instant::now()), EJECTION_MAX, "no overflow");
        state.restore(Instant::now());
        assert!(state.is_ejected(Instant::now()), "a tunnel of before restores nothing");
        tokio::time::advance(EJECTION_MAX).await;
        state.restore(Instant::now());
        assert_eq!(state.eject(Instant::now()).as_secs(), 5);
    }

    #[test]
    fn the_time_of_dials_is_a_mean_that_follows_them() {
        let state = EndpointState::default();
        assert_eq!(state.mean_dial_millis(), 1, "before the first dial");
        let dialled = |micros, times, millis: std::ops::RangeInclusive<u32>| {
            for _ in 0..times {
                state.record_dial(Duration::from_micros(micros));
            }
            let mean = state.mean_dial_millis();
            assert!(millis.contains(&mean), "{mean} after {times} of {micros} us");
        };
        dialled(80_000, 1, 80..=80);
        dialled(80_000, 100, 79..=80);
        dialled(300, 1, 70..=71);
        dialled(300, 50, 1..=1);
        dialled(0, 50, 1..=1);
        dialled(10_000_000, 100, 2_095..=2_098);
    }

    #[tokio::test(start_paused = true)]
    async fn advertised_capacities_are_smoothed_and_expire() {
        let state = EndpointState::default();
        let second = Duration::from_secs(1);
        assert_eq!(state.free_capacity(Instant::now()), None);
        let mut matched_by = Vec::new();
        let record = |ready| {
            let load = ServiceLoad { ready, free_percent: 50 };
            state.record_load(load, Instant::now());
        };
        for ready in [16, 8, 8] {
            record(ready);
            record(1000);
            matched_by.push(state.free_capacity(Instant::now()));
            tokio::time::advance(second).await;
        }
        assert_eq!(matched_by, [Some(800), Some(700), Some(625)]);
        tokio::time::advance(58 * second).await;
        assert_eq!(state.free_capacity(Instant::now()), Some(625));
        tokio::time::advance(second).await;
        assert_eq!(state.free_capacity(Instant::now()), None);
        record(0);
        assert_eq!(state.free_capacity(Instant::now()), Some(0), "no old mean");
        tokio::time::advance(second).await;
        record(u32::MAX);
        assert_eq!(state.free_capacity(Instant::now()), Some(u32::MAX));
    }

    #[test]
    fn the_load_is_given_back_when_a_tunnel_ends() {
        let state = Arc::new(EndpointState::default());
        let first = InFlight::new(&state);
        let second = InFlight::new(&state);
        assert_eq!(state.in_flight(), 2);
        drop((first, second));
        assert_eq!(state.in_flight(), 0);
    }
}
