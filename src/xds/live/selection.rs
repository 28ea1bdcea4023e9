//! Objects that are used: those of selected namespaces, without what may open a service while a
//! policy about it may be unknown.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::held::RULE;
use super::{KINDS, LiveObject, Place, Problem, Selector, State, Watched};
use crate::xds::hold::Before;
use crate::yaml::{Finding, Severity};

/// Kinds that restrict what is exported. A Namespace may name a waypoint, and a Service may stay in
/// its cluster.
const RESTRICTING: [&str; 3] = ["Namespace", "Service", "ServiceExpositionPolicy"];

/// Kinds whose objects export services.
const EXPORTING: [&str; 2] = ["Service", "ServiceExport"];

/// Time in which other kinds may be listed after those that every API server has. Then the objects
/// of the cache file serve for these other kinds alone.
const FILE_TIME: Duration = Duration::from_secs(60);

impl State {
    /// Ends the time in which the objects of the cache file serve together, once all kinds are
    /// listed, or [`FILE_TIME`] after those that every API server has.
    pub(super) fn end_file(&mut self) {
        if !self.serves_file {
            return;
        }
        let now = Instant::now();
        let is_restored = |kind: &&str| self.kinds.get(*kind).is_some_and(|one| one.is_restored);
        if !RULE.on.iter().any(is_restored) {
            self.file_end.get_or_insert(now + FILE_TIME);
        }
        let is_late = self.file_end.is_some_and(|end| end <= now);
        if !is_late && self.kinds.values().any(|one| one.is_restored) {
            return;
        }
        self.serves_file = false;
        // The lists replace the objects of the file now, and are compared with them.
        let listed = self.kinds.values_mut().filter(|one| !one.is_restored);
        listed.for_each(|one| one.listed_at = Some((now, Before::Gap)));
    }

    /// Makes the listed objects usable that are selected, with those whose removal waits. Returns
    /// those that may not be used yet. The objects of closed namespaces do not wait.
    pub(super) fn select(
        &mut self,
        selector: Option<&Selector>,
        closed: &BTreeSet<Arc<str>>,
    ) -> Vec<Arc<LiveObject>> {
        loop {
            let lost = match selector {
                Some(_) => self.lost_namespaces(),
                None => BTreeMap::new(),
            };
            let lists = KINDS.iter().filter_map(|(kind, _)| self.kinds.get(kind));
            let listed = lists.flat_map(|one| one.objects.objects.values());
            let namespaces = self.kinds.get("Namespace").map(|one| &one.objects.objects);
            let find =
                |name: &str| namespaces.and_then(|all| all.get(name)).or_else(|| lost.get(name));
            let is_used = |one: &&Arc<LiveObject>| {
                selector.is_none_or(|selector| is_selected(selector, one, find))
            };
            let selected = listed.filter(is_used).cloned().collect();
            let (objects, withheld) = self.withhold(selected);
            self.usable = Some(self.with_held(objects, closed, &lost));
            // The objects of a namespace that is gone are judged after it.
            if lost.keys().all(|name| self.hold.contains("Namespace", name)) {
                return withheld;
            }
        }
    }

    /// Returns the usable Namespaces that the list lacks: their removal is judged next, or waits.
    fn lost_namespaces(&self) -> BTreeMap<String, Arc<LiveObject>> {
        let listed = self.kinds.get("Namespace").map(|one| &one.objects.objects);
        let is_lost = |one: &&Arc<LiveObject>| {
            one.kind.0 == "Namespace" && !listed.is_some_and(|all| all.contains_key(&one.name))
        };
        let usable = self.usable.iter().flatten().filter(is_lost);
        usable.map(|one| (one.name.clone(), Arc::clone(one))).collect()
    }

    /// Returns whether objects that may restrict an export are not known.
    pub(super) fn is_unread(&self) -> bool {
        self.unread().next().is_some()
    }

    fn unread(&self) -> impl Iterator<Item = &'static str> {
        let is_unread = |kind: &&str| self.kinds.get(*kind).is_some_and(Watched::is_unread);
        RESTRICTING.into_iter().filter(is_unread)
    }

    /// Returns the objects that may be used, and those that may not: what would export more than
    /// its last version while [`Self::is_unread`]. That version stays.
    fn withhold(
        &self,
        objects: Vec<Arc<LiveObject>>,
    ) -> (Vec<Arc<LiveObject>>, Vec<Arc<LiveObject>>) {
        let Some(usable) = self.usable.as_ref().filter(|_| self.is_unread()) else {
            return (objects, Vec::new());
        };
        let usable: HashMap<_, _> = usable.iter().map(|one| (one.key(), one)).collect();
        let mut withheld = Vec::new();
        let may_be_used = |one: Arc<LiveObject>| {
            let old = usable.get(&one.key()).copied();
            let is_open = old.is_some_and(|old| one.read.openness() <= old.read.openness());
            if is_open || !EXPORTING.contains(&one.kind.0) {
                return Some(one);
            }
            withheld.push(one);
            old.cloned()
        };
        let used = objects.into_iter().filter_map(may_be_used).collect();
        (used, withheld)
    }

    /// Returns the finding about an object that may not be used yet.
    pub(super) fn refusal(&self, one: &LiveObject) -> Finding {
        let file = format!("{} {}", one.kind.0, one.name).into();
        let kinds = self.unread().collect::<Vec<_>>().join(", ");
        let what = format!("what it exports waits: {kinds} cannot be read, and may restrict it");
        let warning = Finding::warning(&Place { file, line: 0 }, what, "");
        Finding { severity: Severity::PassedOver, ..warning.of(one.namespace()) }
    }
}

impl Watched {
    /// Returns whether its objects may not be those of the API server. A kind that does not exist
    /// has none.
    fn is_unread(&self) -> bool {
        let is_missing = self.problem == Some(Problem::Missing) && self.objects.objects.is_empty();
        self.is_restored || (self.problem.is_some() && !is_missing)
    }
}

/// Returns whether a selector has the namespace of an object. One that is not listed has no labels,
/// and is not selected. Nodes have no namespace.
pub(super) fn is_selected<'a>(
    selector: &Selector,
    object: &LiveObject,
    find: impl Fn(&str) -> Option<&'a Arc<LiveObject>>,
) -> bool {
    let of = match object.kind.0 {
        "Node" => return true,
        "Namespace" => find(&object.name),
        _ => find(object.namespace()),
    };
    // The labels of an invalid one are unknown, and its objects may restrict others.
    of.is_some_and(|of| {
        of.read.has_invalid_namespace()
            || selector.matches(|label| of.read.label_of_namespace(label))
    })
}
