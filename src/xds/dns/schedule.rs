//! Schedule of DNS lookups and merging of their answers. It does no I/O and takes the time as a
//! parameter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Limit of hostnames. At a TTL of 30 s it causes some 300 lookups per second. A namespace has at
/// most half of what the others leave, and gateways of other networks all of it.
pub(super) const NAMES_MAX: usize = 10_000;
/// Limit of concurrent lookups, of two queries each. They are divided as hostnames are, so that
/// lookups that time out delay those of their namespace only.
pub(super) const LOOKUPS_MAX: usize = 64;
/// Limit of addresses per hostname, twice what fits into a DNS answer over UDP.
pub(super) const ADDRESSES_MAX: usize = 64;
/// Lower and upper bound of a TTL.
const TTL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5 * 60));
/// Delay after a failure: the first one, and the upper bound of its doubling.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Deadline after which an unanswered lookup starts again, because its task is gone.
const LOOKUP_LOST_AFTER: Duration = Duration::from_secs(60);

/// Result of a lookup for one address family, possibly empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FamilyAnswer {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ttl: Duration,
}

/// Answers of one lookup: IPv4 and IPv6.
pub(super) type Answers = [Result<FamilyAnswer, String>; 2];

/// Effect of a lookup on a hostname.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// All addresses, if they have changed.
    pub(super) new_addresses: Option<Arc<[IpAddr]>>,
    /// Number of addresses beyond the limit.
    pub(super) omitted: usize,
    /// Error of the lookup. The known addresses of a failed family remain.
    pub(super) error: Option<String>,
}

#[derive(Debug, Default)]
struct HostState {
    /// Namespace; empty for a gateway of another network.
    owner: Arc<str>,
    /// Last successful answer of each family.
    families: [Vec<IpAddr>; 2],
    addresses: Arc<[IpAddr]>,
    lookup_started: Option<Instant>,
    failures: u32,
    next: Option<Instant>,
}

/// All hostnames, ordered by the time of their next lookup.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    names: HashMap<Arc<str>, HostState>,
    /// Those names by owner: one without room for a lookup is passed over with all of its names.
    due: HashMap<Arc<str>, BTreeSet<(Instant, Arc<str>)>>,
    /// Names that are looked up, with their owners and the start.
    running: HashMap<Arc<str>, (Arc<str>, Instant)>,
    /// Names that wait for a place, with their owners.
    left_out: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
}

impl Schedule {
    /// Adds a hostname of these owners, which waits until [`Self::admit`]. One that has a place
    /// keeps it, under another owner if its own is none of them.
    pub(super) fn add(&mut self, name: &Arc<str>, owners: &BTreeSet<Arc<str>>) {
        let Some(known) = self.names.get_mut(name) else {
            self.left_out.insert(Arc::clone(name), owners.clone());
            return;
        };
        if let Some(owner) = owners.first().filter(|_| !owners.contains(&known.owner)) {
            let (old, next) =
                (mem::replace(&mut known.owner, Arc::clone(owner)), known.next.take());
            self.release(name, &old, next);
            next.into_iter().for_each(|next| self.set_due(name, next));
        }
    }

    /// Takes a name that is due at a time from its owner.
    fn release(&mut self, name: &Arc<str>, owner: &str, next: Option<Instant>) {
        if let Some((due, next)) = self.due.get_mut(owner).zip(next) {
            due.remove(&(next, Arc::clone(name)));
        }
    }

    /// Removes a hostname.
    pub(super) fn remove(&mut self, name: &Arc<str>) {
        let Some(old) = self.names.remove(name) else {
            self.left_out.remove(name);
            return;
        };
        self.release(name, &old.owner, old.next);
    }

    /// Gives hostnames that wait a place, if their owners may have another one. They are due
    /// immediately.
    pub(super) fn admit(&mut self, now: Instant) {
        let waiting = mem::take(&mut self.left_out).into_iter();
        let is_gateway = |(_, owners): &(_, BTreeSet<Arc<str>>)| owners.contains("");
        let (gateways, others): (Vec<_>, Vec<_>) = waiting.partition(is_gateway);
        for (name, owners) in gateways.into_iter().chain(others) {
            let owner = owners.iter().find(|owner| self.has_room(owner)).cloned();
            let Some(owner) = owner else {
                self.left_out.insert(name, owners);
                continue;
            };
            let state = HostState { owner, ..HostState::default() };
            self.names.insert(Arc::clone(&name), state);
            self.set_due(&name, now);
        }
        self.due.retain(|_, names| !names.is_empty());
    }

    /// Returns whether an owner may have another place.
    fn has_room(&self, owner: &str) -> bool {
        let own = self.due.get(owner).map_or(0, BTreeSet::len);
        may_take(owner, own, self.names.len(), NAMES_MAX)
    }

    /// Returns the last known addresses of a hostname; none before the first answer.
    pub(super) fn addresses(&self, name: &str) -> Arc<[IpAddr]> {
        let known = self.names.get(name);
        known.map_or_else(Arc::default, |known| Arc::clone(&known.addresses))
    }

    /// Returns the number of hostnames that the limit leaves out.
    pub(super) fn left_out(&self) -> usize {
        self.left_out.len()
    }

    /// Returns the time of the next lookup; none until one has ended if there is no room.
    pub(super) fn next(&self) -> Option<Instant> {
        let lost = self.running.values().map(|(_, begun)| *begun + LOOKUP_LOST_AFTER);
        self.next_lookup().map(|(at, _)| *at).into_iter().chain(lost).min()
    }

    /// Returns the first hostname, and its time, that is not looked up and whose owner may have
    /// another lookup.
    fn next_lookup(&self) -> Option<&(Instant, Arc<str>)> {
        let mut running = HashMap::<&str, usize>::new();
        for (owner, _) in self.running.values() {
            *running.entry(owner).or_default() += 1;
        }
        let with_room = self.due.iter().filter(|(owner, _)| {
            let own = running.get(&***owner).copied().unwrap_or_default();
            may_take(owner, own, self.running.len(), LOOKUPS_MAX)
        });
        let is_idle = |(_, name): &&(_, _)| !self.running.contains_key(name);
        with_room.filter_map(|(_, names)| names.iter().find(is_idle)).min()
    }

    /// Starts the lookup of a hostname that is due, and returns it.
    pub(super) fn start_next_lookup(&mut self, now: Instant) -> Option<Arc<str>> {
        self.running.retain(|_, (_, begun)| now < *begun + LOOKUP_LOST_AFTER);
        let (_, name) = self.next_lookup().filter(|(at, _)| *at <= now)?;
        let name = Arc::clone(name);
        let known = self.names.get_mut(&name)?;
        known.lookup_started = Some(now);
        self.running.insert(Arc::clone(&name), (Arc::clone(&known.owner), now));
        self.set_due(&name, now + LOOKUP_LOST_AFTER);
        Some(name)
    }

    /// Requests a refresh after an address did not answer. Lookups of a hostname start at least
    /// the shortest TTL apart.
    pub(super) fn request_refresh(&mut self, name: &Arc<str>, now: Instant) {
        let Some(known) = self.names.get(name) else {
            return;
        };
        let soon = known.lookup_started.map_or(now, |begun| now.max(begun + TTL_RANGE.0));
        if known.next.is_none_or(|next| soon < next) {
            self.set_due(name, soon);
        }
    }

    /// Applies the answers of a lookup. Returns none if the hostname was removed.
    pub(super) fn apply_answers(
        &mut self,
        name: &Arc<str>,
        answers: Answers,
        now: Instant,
    ) -> Option<Outcome> {
        self.running.remove(name);
        let known = self.names.get_mut(name)?;
        let (outcome, ttl) = known.merge(answers);
        let wait = match &outcome.error {
            None => ttl.clamp(TTL_RANGE.0, TTL_RANGE.1),
            Some(_) => {
                let doubled =
                    BACKOFF_RANGE.0 * 2_u32.saturating_pow(known.failures.saturating_sub(1));
                doubled.min(BACKOFF_RANGE.1)
            }
        };
        // A refresh that was requested during the lookup may be newer than the answer, so it
        // stays due.
        let begun = known.lookup_started.unwrap_or(now);
        let doubted = known.next.filter(|next| *next < begun + LOOKUP_LOST_AFTER);
        let next = doubted.map_or(now + wait, |doubted| doubted.min(now + wait));
        self.set_due(name, next);
        Some(outcome)
    }

    fn set_due(&mut self, name: &Arc<str>, at: Instant) {
        if let Some(known) = self.names.get_mut(name) {
            let due = self.due.entry(Arc::clone(&known.owner)).or_default();
            if let Some(old) = known.next.replace(at) {
                due.remove(&(old, Arc::clone(name)));
            }
            due.insert((at, Arc::clone(name)));
        }
    }
}

/// Returns whether an owner that has `own` of `all` places that are taken may take another one: up
/// to half of what others leave, and a gateway of another network all of it.
fn may_take(owner: &str, own: usize, all: usize, max: usize) -> bool {
    let free = max.saturating_sub(all - own);
    own < if owner.is_empty() { free } else { free / 2 }
}

impl HostState {
    /// Merges the answers. A successful answer replaces the addresses of its family, and a
    /// failed family keeps its own. Both families keep theirs if no address would remain.
    fn merge(&mut self, answers: Answers) -> (Outcome, Duration) {
        let mut families = self.families.clone();
        let (mut ttl, mut errors) = (TTL_RANGE.1, Vec::new());
        for (family, answer) in families.iter_mut().zip(answers) {
            match answer {
                Ok(found) => {
                    if !found.addresses.is_empty() {
                        ttl = ttl.min(found.ttl);
                    }
                    *family = found.addresses;
                }
                Err(error) if errors.contains(&error) => {}
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() && families.iter().all(Vec::is_empty) {
            errors.push("no address in the answer".to_owned());
        }
        let error = (!errors.is_empty()).then(|| errors.join("; "));
        self.failures = match error {
            Some(_) => self.failures.saturating_add(1),
            None => 0,
        };
        if families.iter().all(Vec::is_empty) {
            families = self.families.clone();
        }
        self.families = families;
        // Servers rotate their answers. Sorting makes the addresses within the limit stable.
        let addresses: BTreeSet<_> = self.families.iter().flatten().copied().collect();
        let more = addresses.len().saturating_sub(ADDRESSES_MAX);
        let addresses: Arc<[IpAddr]> = addresses.into_iter().take(ADDRESSES_MAX).collect();
        let changed = (addresses != self.addresses).then(|| Arc::clone(&addresses));
        self.addresses = addresses;
        let outcome = Outcome { new_addresses: changed, omitted: more, error };
        (outcome, ttl)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn v6(last: u16) -> IpAddr {
        [0xfd00, 0, 0, 0, 0, 0, 0, last].into()
    }

    fn found(addresses: &[IpAddr], seconds: u64) -> Result<FamilyAnswer, String> {
        Ok(FamilyAnswer { addresses: addresses.to_vec(), ttl: Duration::from_secs(seconds) })
    }

    fn failed() -> Result<FamilyAnswer, String> {
        Err("timed out".to_owned())
    }

    /// Schedule with one name, and its clock.
    struct One {
        schedule: Schedule,
        name: Arc<str>,
        now: Instant,
    }

    impl One {
        fn new() -> Self {
            let (mut schedule, name, now) = (Schedule::default(), "db".into(), Instant::now());
            schedule.add(&name, &["app".into()].into());
            schedule.admit(now);
            Self { schedule, name, now }
        }

        /// Looks the name up, which must be due. Returns the outcome and the milliseconds until
        /// the next lookup.
        fn look_up(&mut self, answers: Answers) -> (Outcome, u128) {
            assert_eq!(self.schedule.start_next_lookup(self.now).as_ref(), Some(&self.name));
            let outcome = self.schedule.apply_answers(&self.name, answers, self.now);
            let next = self.schedule.next().expect("a time");
            (outcome.expect("it is wanted"), (next - self.now).as_millis())
        }

        fn wait(&mut self, milliseconds: u64) {
            self.now += Duration::from_millis(milliseconds);
        }

        fn is_due(&self) -> bool {
            self.schedule.next().is_some_and(|next| next <= self.now)
        }
    }

    #[test]
    fn a_ttl_counts_from_one_second_to_five_minutes() {
        let mut one = One::new();
        let rows = [(0, 1_000), (1, 1_000), (30, 30_000), (86_400, 300_000)];
        for (ttl, want) in rows {
            let (_, next) = one.look_up([found(&[ip(1)], ttl), found(&[], 0)]);
            assert_eq!(next, want, "a TTL of {ttl} s");
            one.wait(u64::try_from(want).expect("short") - 1);
            assert!(!one.is_due());
            one.wait(1);
            assert!(one.is_due());
        }
        // The shorter TTL of the two families applies.
        assert_eq!(one.look_up([found(&[ip(1)], 20), found(&[v6(1)], 7)]).1, 7_000);
    }

    #[test]
    fn all_addresses_of_both_families_are_used_and_only_a_change_is_reported() {
        let mut one = One::new();
        let both = [found(&[ip(2), ip(1), ip(2)], 1), found(&[v6(1)], 1)];
        let (outcome, _) = one.look_up(both);
        assert_eq!(outcome.new_addresses.as_deref(), Some(&[ip(1), ip(2), v6(1)][..]));
        one.wait(1_000);
        let turned = [found(&[ip(1), ip(2)], 1), found(&[v6(1)], 1)];
        assert_eq!(one.look_up(turned).0, Outcome::default());
        one.wait(1_000);
        let (outcome, _) = one.look_up([found(&[ip(9)], 1), found(&[], 1)]);
        assert_eq!(outcome.new_addresses.as_deref(), Some(&[ip(9)][..]), "replaced at once");
        one.wait(1_000);
        let many: Vec<_> = (0..100).rev().map(ip).collect();
        let (outcome, _) = one.look_up([found(&many, 1), found(&[], 1)]);
        let changed = outcome.new_addresses.expect("a change");
        assert_eq!((changed.len(), outcome.omitted), (ADDRESSES_MAX, 36));
        assert_eq!(changed[0], ip(0), "of many always the same ones");
    }

    #[test]
    fn a_failure_keeps_what_was_known_and_is_backed_off_from() {
        let mut one = One::new();
        one.look_up([found(&[ip(1)], 5), found(&[v6(1)], 5)]);
        one.wait(5_000);
        for want in [1, 2, 4, 8, 16, 32, 60, 60] {
            let (outcome, next) = one.look_up([failed(), failed()]);
            assert_eq!(outcome.new_addresses, None);
            assert_eq!(outcome.error.as_deref(), Some("timed out"));
            assert_eq!(next, want * 1_000);
            one.wait(u64::try_from(next).expect("short"));
        }
        // A failed family keeps its old answer beside the new one of the other family.
        let (outcome, next) = one.look_up([found(&[ip(2)], 5), failed()]);
        assert_eq!(outcome.new_addresses.as_deref(), Some(&[ip(2), v6(1)][..]));
        assert_eq!((outcome.error.as_deref(), next), (Some("timed out"), 60_000));
        one.wait(60_000);
        // An answer without any address counts as a failure.
        let (outcome, _) = one.look_up([found(&[], 5), found(&[], 5)]);
        let error = outcome.error.as_deref();
        assert_eq!((outcome.new_addresses, error), (None, Some("no address in the answer")));
        one.wait(60_000);
        let (outcome, next) = one.look_up([found(&[ip(2)], 5), found(&[], 5)]);
        assert_eq!(outcome.new_addresses.as_deref(), Some(&[ip(2)][..]));
        assert_eq!((outcome.error, next), (None, 5_000));
        one.wait(5_000);
        assert_eq!(one.look_up([failed(), failed()]).1, 1_000, "from the beginning again");
    }

    #[test]
    fn a_refresh_is_looked_up_at_once_and_once_a_second_at_most() {
        let mut one = One::new();
        one.look_up([found(&[ip(1)], 300), found(&[], 0)]);
        one.wait(400);
        for _ in 0..3 {
            one.schedule.request_refresh(&one.name, one.now);
        }
        assert!(!one.is_due());
        one.wait(600);
        one.look_up([found(&[ip(1)], 300), found(&[], 0)]);
        one.wait(100_000);
        one.schedule.request_refresh(&one.name, one.now);
        one.schedule.request_refresh(&"else".into(), one.now);
        assert!(one.is_due());
        // A request during a lookup is kept, and is due one second after the lookup began.
        assert!(one.schedule.start_next_lookup(one.now).is_some());
        one.wait(100);
        one.schedule.request_refresh(&one.name, one.now);
        let answers = [found(&[ip(2)], 300), found(&[], 0)];
        let outcome = one.schedule.apply_answers(&one.name, answers, one.now);
        assert!(outcome.expect("it is wanted").new_addresses.is_some());
        let next = one.schedule.next().expect("a time");
        assert_eq!((next - one.now).as_millis(), 900);
    }

    #[test]
    fn a_lookup_that_says_nothing_is_begun_anew() {
        let mut one = One::new();
        assert!(one.schedule.start_next_lookup(one.now).is_some());
        one.wait(59_999);
        assert!(!one.is_due());
        one.wait(1);
        assert!(one.schedule.start_next_lookup(one.now).is_some());
        one.schedule.remove(&one.name);
        assert!(!one.is_due());
        assert_eq!(one.schedule.apply_answers(&one.name, [failed(), failed()], one.now), None);
    }

    #[test]
    fn lookups_that_do_not_end_leave_room_to_those_of_others() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        for number in 0..1000 {
            schedule.add(&format!("a{number:03}").into(), &["a".into()].into());
        }
        schedule.admit(now);
        let start = |schedule: &mut Schedule| {
            std::iter::from_fn(|| schedule.start_next_lookup(now)).collect::<Vec<_>>()
        };
        let hanging = start(&mut schedule);
        let lost = now + LOOKUP_LOST_AFTER;
        assert_eq!((hanging.len(), schedule.next()), (LOOKUPS_MAX / 2, Some(lost)), "no spin");
        // A name that is looked up takes no second place.
        schedule.request_refresh(&hanging[0], now);
        let later = now + TTL_RANGE.0;
        assert_eq!((schedule.next(), schedule.start_next_lookup(later)), (Some(lost), None));
        schedule.add(&"b".into(), &["b".into()].into());
        schedule.add(&"gateway".into(), &["".into()].into());
        schedule.admit(now);
        assert_eq!(schedule.next(), Some(now));
        assert_eq!(start(&mut schedule), ["b".into(), "gateway".into()]);
        // The place of a lookup that has ended is free, also if its hostname is gone.
        for name in &hanging[..3] {
            schedule.remove(name);
            assert_eq!(schedule.apply_answers(name, [failed(), failed()], now), None);
        }
        assert_eq!(start(&mut schedule).len(), 2, "half of what the others leave");
    }

    #[test]
    fn a_namespace_leaves_places_to_others_and_to_gateways() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let name = |owner: &str, number: usize| Arc::<str>::from(format!("{owner}{number:05}"));
        let mut add = |owner: &str, numbers: Range<usize>| {
            let owners = [owner.into()].into();
            numbers.for_each(|number| schedule.add(&name(owner, number), &owners));
        };
        add("a", 0..NAMES_MAX);
        add("b", 0..NAMES_MAX);
        let held =
            |schedule: &Schedule, owner: &str| schedule.due.get(owner).map_or(0, BTreeSet::len);
        schedule.admit(now);
        assert_eq!(["a", "b", ""].map(|owner| held(&schedule, owner)), [5_000, 2_500, 0]);
        for number in 0..NAMES_MAX {
            schedule.add(&name("", number), &[Arc::default()].into());
        }
        schedule.admit(now);
        assert_eq!(["a", "b", ""].map(|owner| held(&schedule, owner)), [5_000, 2_500, 2_500]);
        assert_eq!((schedule.names.len(), schedule.left_out()), (NAMES_MAX, 20_000));
        // The place of a gateway goes to the next one, and a namespace has half of the rest.
        schedule.remove(&name("", 7));
        schedule.remove(&name("a", 0));
        schedule.remove(&name("b", 9_999));
        schedule.admit(now);
        assert_eq!(["a", "b", ""].map(|owner| held(&schedule, owner)), [4_999, 2_500, 2_501]);
        assert!(schedule.names.contains_key(&name("", 2_500)));
        assert_eq!((schedule.names.len(), schedule.left_out()), (NAMES_MAX, 19_997));
    }

    #[test]
    fn a_hostname_of_several_owners_has_a_place_of_any() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        for number in 0..NAMES_MAX {
            schedule.add(&format!("a{number:05}").into(), &["a".into()].into());
        }
        schedule.admit(now);
        let shared = Arc::from("shared");
        schedule.add(&shared, &["a".into()].into());
        schedule.admit(now);
        assert!(!schedule.names.contains_key(&shared));
        // It is a gateway of another network, too.
        schedule.add(&shared, &["".into(), "a".into()].into());
        schedule.admit(now);
        assert_eq!(&*schedule.names[&shared].owner, "");
        schedule.add(&shared, &["b".into()].into());
        assert_eq!((schedule.due[""].len(), schedule.due["b"].len()), (0, 1));
        assert_eq!(&*schedule.names[&shared].owner, "b");
    }
}
