//! `trust`: trust domains, issuers, revocation lists, and identities of waypoints.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};
use spiffe::TrustDomain as SpiffeTrustDomain;

use super::checks;
use super::crl::{self, Crl};
use super::identity::parse_identity;
use super::serialize::lossy_path_option;
use crate::wire::{SpkiHash, UNKNOWN_CLUSTER};
use crate::yaml::Value;

/// Trust in peers: trust domains, issuers, revocation lists, and identities of waypoints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trust {
    /// The set of trust domains; a peer outside it is refused in the handshake.
    pub domains: Vec<TrustDomain>,
    /// The clusters of peers by the issuers of their certificates. Default: a trust domain stands
    /// for its cluster.
    pub clusters: Vec<IssuerCluster>,
    /// The treatment of peers whose issuer no cluster has, where there are such clusters.
    pub unknown_issuers: UnknownIssuers,
    /// Certificate revocation lists. Default: revocation is not checked.
    pub crl: Option<Crl>,
    /// Acceptance of peers from trust domains outside the set, verified against the shared roots
    /// alone. Default: no.
    pub skip_validation: bool,
    /// Identities of waypoints and ingress gateways whose `x-istio-source` is believed, besides
    /// those of services that are used as waypoints. By default none.
    pub waypoints: Vec<String>,
}

/// One trust domain of the set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrustDomain {
    /// The domain's name, in lower case. Required.
    pub name: String,
    /// The cluster that the domain stands for. Default: the domain's name.
    pub cluster: String,
    /// The issuers that may sign for the domain. Default: every one below its roots.
    pub issuers: Option<Vec<Issuer>>,
    /// Roots of this domain alone. Default: those that come with our certificate, as domains of
    /// one mesh share them; of `identity.kind: spiffe`, the bundle of this domain.
    #[serde(serialize_with = "lossy_path_option")]
    pub roots: Option<PathBuf>,
}

/// A cluster and the issuers of its peers' certificates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IssuerCluster {
    /// The cluster's name. Required.
    pub name: String,
    /// Its issuers. Required, at least one.
    pub issuers: Vec<Issuer>,
}

/// The authority whose key signs leaves: an intermediate, or a root without one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Issuer {
    /// The SHA-256 of its SubjectPublicKeyInfo.
    Hash(SpkiHash),
    /// A PEM file with its certificate, or with those of several.
    File(PathBuf),
}

/// The treatment of peers whose issuer has no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownIssuers {
    /// They belong to the cluster `unknown`.
    #[default]
    Accept,
    /// They are refused in the handshake.
    Reject,
}

impl Trust {
    /// The names of the clusters that peers may belong to; none where any name may be one.
    pub(super) fn cluster_names(&self) -> Option<BTreeSet<String>> {
        if !self.clusters.is_empty() {
            let unknown = (self.unknown_issuers == UnknownIssuers::Accept)
                .then(|| UNKNOWN_CLUSTER.to_owned());
            let named = self.clusters.iter().map(|cluster| cluster.name.clone());
            return Some(named.chain(unknown).collect());
        }
        let domains = self.domains.iter();
        let clusters = domains.map(|domain| domain.cluster.clone()).collect();
        (!self.skip_validation).then_some(clusters)
    }

    /// The lists of issuers, of clusters and of trust domains.
    pub fn issuer_lists(&mut self) -> impl Iterator<Item = &mut Vec<Issuer>> {
        let clusters = self.clusters.iter_mut().map(|one| &mut one.issuers);
        let domains = self.domains.iter_mut();
        clusters.chain(domains.filter_map(|one| one.issuers.as_mut()))
    }

    /// The files that are watched: roots, issuers and revocation lists.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let roots = self.domains.iter().filter_map(|one| one.roots.as_ref());
        let of_domains = self.domains.iter().flat_map(|one| &one.issuers).flatten();
        let of_clusters = self.clusters.iter().flat_map(|one| &one.issuers);
        let issuers = of_clusters.chain(of_domains).filter_map(Issuer::file);
        let crls = self.crl.iter().flat_map(|crl| &crl.files);
        roots.chain(issuers).chain(crls)
    }
}

impl Issuer {
    /// The file, if it is one.
    pub fn file(&self) -> Option<&PathBuf> {
        match self {
            Self::Hash(_) => None,
            Self::File(file) => Some(file),
        }
    }
}

impl fmt::Display for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hash(hash) => hash.fmt(f),
            Self::File(file) => file.display().fmt(f),
        }
    }
}

impl Serialize for Issuer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads the section.
pub(super) fn read(value: Value<'_>) -> Option<Trust> {
    let mut fields = value.fields("trust")?;
    fields.later(&["end_tunnels_at_expiry"]);
    let skip_validation = match fields.get("skip_validation") {
        Some(flag) => skip_validation(flag),
        None => Some(false),
    };
    let list = match skip_validation {
        Some(true) => fields.get("domains"),
        _ => fields.need("domains", "[{name: east.local, cluster: east}]"),
    };
    let clusters = fields.get("clusters").map(clusters);
    let has_issuers = clusters.is_some();
    let unknown_issuers = fields.get("unknown_issuers");
    let crl = fields.get("crl").map(crl::read);
    let waypoints = match fields.get("waypoints") {
        Some(list) => list.items().map(workload_id).collect::<Vec<_>>(),
        None => Vec::new(),
    };
    fields.finish();
    let domains = skip_validation.and_then(|skips| domains(list, skips, has_issuers));
    let clusters = match clusters {
        Some(clusters) => clusters?,
        None => Vec::new(),
    };
    let unknown_issuers = match unknown_issuers {
        Some(value) => self::unknown_issuers(value, &clusters)?,
        None => UnknownIssuers::default(),
    };
    let waypoints = waypoints.into_iter().collect::<Option<_>>()?;
    let crl = match crl {
        Some(crl) => Some(crl?),
        None => None,
    };
    Some(Trust {
        domains: domains?,
        clusters,
        unknown_issuers,
        crl,
        skip_validation: skip_validation?,
        waypoints,
    })
}

/// Reads the set of trust domains, which may be missing or empty if validation is skipped.
fn domains(
    list: Option<Value<'_>>,
    skip_validation: bool,
    has_issuers: bool,
) -> Option<Vec<TrustDomain>> {
    let items: Vec<_> = match list {
        Some(list) if list.is_vacant() && !skip_validation => {
            let what = "is empty, which would refuse every peer";
            list.error(
                what,
                "`- {name: east.local, cluster: east}` for each domain",
            );
            return None;
        }
        Some(list) => list.items().collect(),
        None if skip_validation => Vec::new(),
        None => return None,
    };
    let read: Vec<_> = items
        .into_iter()
        .map(|item| Some((trust_domain(item, has_issuers)?, item)))
        .collect();
    checks::repeated(
        read.iter()
            .flatten()
            .map(|(domain, item)| (domain.name.as_str(), *item)),
    );
    read.into_iter().map(|read| Some(read?.0)).collect()
}

/// Reads the clusters that issuers stand for.
fn clusters(list: Value<'_>) -> Option<Vec<IssuerCluster>> {
    if list.is_vacant() {
        let how = "`- {name: west, issuers: [west-ca.pem]}` for each cluster, or remove the key";
        list.error("is empty", how);
        return None;
    }
    let read: Vec<_> = list
        .items()
        .map(|item| Some((cluster(item)?, item)))
        .collect();
    let named = read.iter().flatten();
    checks::repeated(named.map(|(cluster, item)| (cluster.name.as_str(), *item)));
    read.into_iter().map(|read| Some(read?.0)).collect()
}

fn cluster(value: Value<'_>) -> Option<IssuerCluster> {
    let mut fields = value.fields("trust.clusters[]")?;
    let name = fields.need("name", "west");
    let name = name.and_then(|name| cluster_name(name, true));
    let issuers = fields.need("issuers", "[west-ca.pem]").and_then(issuers);
    fields.finish();
    Some(IssuerCluster {
        name: name?.to_owned(),
        issuers: issuers?,
    })
}

/// Reads the name of a cluster. Where issuers say the clusters, one name is that of all issuers
/// without an entry.
pub(super) fn cluster_name(name: Value<'_>, has_issuers: bool) -> Option<&str> {
    let text = name.text()?;
    if has_issuers && text == UNKNOWN_CLUSTER {
        let what = format!("is `{UNKNOWN_CLUSTER}`, which is the cluster of all other issuers");
        name.error(what, "another name");
        return None;
    }
    Some(text)
}

/// Reads a list of issuers, which names at least one.
fn issuers(list: Value<'_>) -> Option<Vec<Issuer>> {
    if list.is_vacant() {
        list.error("is empty", "at least one issuer");
        return None;
    }
    let read: Vec<_> = list.items().map(issuer).collect();
    read.into_iter().collect()
}

fn issuer(value: Value<'_>) -> Option<Issuer> {
    /// A text of hexadecimal digits that is as long is a hash with a mistake, and no file.
    const MISTYPED_MIN: usize = 32;
    let text = value.text()?;
    if let Some(hash) = SpkiHash::parse(text) {
        return Some(Issuer::Hash(hash));
    }
    if text.len() >= MISTYPED_MIN && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let what = format!("has {} hexadecimal digits", text.len());
        value.error(what, "the 64 of a SHA-256, or the path of a PEM file");
        return None;
    }
    value.credential_path().map(Issuer::File)
}

/// Reads the treatment of issuers without an entry, which needs entries.
fn unknown_issuers(value: Value<'_>, clusters: &[IssuerCluster]) -> Option<UnknownIssuers> {
    let words = [
        ("accept", UnknownIssuers::Accept),
        ("reject", UnknownIssuers::Reject),
    ];
    let read = value.choice(&words)?;
    if clusters.is_empty() {
        let what = "says what becomes of issuers that `trust.clusters` does not name, and there is \
                    no such key";
        value.error(what, "`trust.clusters` too, or remove it");
        return None;
    }
    Some(read)
}

/// Reads the flag that gives up the set of trust domains, and warns of it.
fn skip_validation(flag: Value<'_>) -> Option<bool> {
    let skips = flag.flag()?;
    if skips {
        let what = "is true: a peer of any trust domain is accepted under the shared roots, and \
                    its domain's name stands for its cluster";
        flag.warning(what, "`trust.domains` with each domain instead");
    }
    Some(skips)
}

/// The identity of a workload, as its certificate has it.
fn workload_id(value: Value<'_>) -> Option<String> {
    let wanted = "an identity, such as `spiffe://west.local/ns/app/sa/waypoint`";
    value.parsed(wanted, |text| parse_identity(text).map(|_| text.to_owned()))
}

fn trust_domain(value: Value<'_>, has_issuers: bool) -> Option<TrustDomain> {
    let mut fields = value.fields("trust.domains[]")?;
    fields.later(&["aliases"]);
    let name = fields
        .need("name", "east.local")
        .and_then(trust_domain_name);
    let cluster = fields
        .get("cluster")
        .map_or(name.as_deref(), |name| cluster_name(name, has_issuers))
        .map(str::to_owned);
    let issuers = fields.get("issuers").map(issuers);
    let roots = fields.get("roots").map(Value::credential_path);
    fields.finish();
    let issuers = match issuers {
        Some(issuers) => Some(issuers?),
        None => None,
    };
    let roots = match roots {
        Some(roots) => Some(roots?),
        None => None,
    };
    Some(TrustDomain {
        name: name?,
        cluster: cluster?,
        issuers,
        roots,
    })
}

pub(super) fn trust_domain_name(value: Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.contains('*') {
        let what = format!("is `{text}`, and a pattern would trust domains that nobody named");
        value.error(what, "each trust domain by its name");
        return None;
    }
    let wanted = "the name of a trust domain alone, such as `east.local`";
    value.parsed(wanted, |text| {
        let name = SpiffeTrustDomain::new(text)
            .ok()
            .filter(|_| !text.contains("://"))?;
        Some(name.as_str().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use crate::config::tests::{GOOD, check, instead};

    use super::*;

    const HASH: &str = "0123456789abcdef0123456789abcdef0123456789ABCDEF0123456789ABCDEF";

    /// The findings about the good file with more keys in its `trust`, on line 4.
    fn with(keys: &str) -> String {
        instead("  domains:", &format!("{keys}\n  domains:"))
    }

    #[test]
    fn istiod_5_a_cluster_is_a_name_with_hashes_or_files_of_issuers() {
        let cluster = |entry: &str| with(&format!("  clusters: [{entry}]"));
        for (entry, want) in [
            (
                &*format!("{{name: west, issuers: [{HASH}, Cargo.toml]}}"),
                "",
            ),
            (
                "",
                "4: error: `trust.clusters` is empty; write `- {name: west",
            ),
            (
                "{name: west}",
                "4: error: `trust.clusters[]` has no `issuers`",
            ),
            (
                "{name: west, issuers: []}",
                "4: error: `trust.clusters[].issuers` is empty; write at least one issuer",
            ),
            (
                "{name: west, issuers: [0123456789abcdef0123456789abcdef]}",
                "4: error: `trust.clusters[].issuers[]` has 32 hexadecimal digits; write the 64 of",
            ),
            (
                "{name: west, issuers: [/absent.pem]}",
                "4: error: `trust.clusters[].issuers[]` is `/absent.pem`: No such",
            ),
            (
                "{name: unknown, issuers: [Cargo.toml]}",
                "4: error: `trust.clusters[].name` is `unknown`, which is the cluster of all",
            ),
            (
                "{name: west, issuers: [Cargo.toml]}, {name: west, issuers: [Cargo.toml]}",
                "4: error: `trust.clusters[]` has `west` twice, first on line 4",
            ),
        ] {
            let said = cluster(entry);
            let is_wanted = said.starts_with(want) && said.is_empty() == want.is_empty();
            assert!(is_wanted, "{entry}: {said}");
        }
        let alone = with("  unknown_issuers: reject");
        let want = "4: error: `trust.unknown_issuers` says what becomes of issuers that";
        assert!(alone.starts_with(want), "{alone}");
    }

    #[test]
    fn istiod_5_with_issuers_no_other_entry_names_the_cluster_of_all_others() {
        let keys = format!("  clusters: [{{name: west, issuers: [{HASH}]}}]\n  domains:");
        let issuers = GOOD.replacen("  domains:", &keys, 1);
        let (own, domain) = ("gateway: {cluster: east}", "Local, cluster: east}");
        for (old, new, want) in [
            (
                own,
                "gateway: {cluster: unknown}",
                "1: error: `gateway.cluster` is `unknown`,",
            ),
            (
                domain,
                "Local, cluster: unknown}",
                "`trust.domains[].cluster` is `unknown`,",
            ),
        ] {
            let (_, said) = check(&issuers.replacen(old, new, 1));
            assert!(said.contains(want), "{said}");
            // Without issuers it is a name as any other.
            assert_eq!(instead(old, new), "");
        }
    }

    #[test]
    fn istiod_5_with_issuers_their_clusters_and_unknown_are_all_that_there_is() {
        let file = |more: &str, cluster: &str| {
            let keys =
                format!("  clusters: [{{name: north, issuers: [{HASH}]}}]{more}\n  domains:");
            let to =
                format!("exposure: {{services: [{{service: a, to: [{{cluster: {cluster}}}]}}]}}");
            check(&(GOOD.replacen("  domains:", &keys, 1) + &to))
        };
        for (more, cluster, want) in [
            ("", "north", ""),
            ("", "unknown", ""),
            (
                "",
                "west",
                "is `west`, and `trust` names no such cluster; write one of `north`, `unk",
            ),
            ("\n  unknown_issuers: reject", "north", ""),
            (
                "\n  unknown_issuers: reject",
                "unknown",
                "write one of `north`",
            ),
        ] {
            let (_, said) = file(more, cluster);
            let is_wanted = said.contains(want) && said.is_empty() == want.is_empty();
            assert!(is_wanted, "{more} {cluster}: {said}");
        }
        let (config, _) = file("\n  unknown_issuers: reject", "north");
        let trust = config.expect("a configuration").trust;
        assert_eq!(trust.unknown_issuers, UnknownIssuers::Reject);
        let shown = serde_json::to_value(&trust).expect("JSON");
        assert_eq!(shown["clusters"][0]["issuers"][0], HASH.to_lowercase());
        assert_eq!(shown["unknown_issuers"], "reject");
    }

    #[test]
    fn istiod_5_a_domain_may_name_its_issuers() {
        let of = |issuers: &str| {
            let new = format!("{{name: west.local, cluster: west, issuers: {issuers}}}");
            check(&GOOD.replacen("{name: west.local, cluster: west}", &new, 1))
        };
        let (config, said) = of(&format!("[{HASH}, Cargo.toml]"));
        assert_eq!(said, "");
        let mut trust = config.expect("a configuration").trust;
        let hash = SpkiHash::parse(HASH).expect("a hash");
        let issuers = trust.domains[1].issuers.as_ref().expect("issuers");
        assert_eq!(issuers[0], Issuer::Hash(hash));
        assert!(trust.files().any(|file| file.ends_with("Cargo.toml")));
        assert_eq!(trust.issuer_lists().count(), 1);
        let (_, said) = of("[]");
        let want = "6: error: `trust.domains[].issuers` is empty; write at least one issuer";
        assert_eq!(said, want);
    }
}
