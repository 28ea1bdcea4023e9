//! The `trust` section: trust domains, issuers, revocation lists, and identities of waypoints.

use std::collections::BTreeSet;
use std::path::PathBuf;

use derive_more::Display;
use serde_json::json;

use super::define::{
    Credential, NonEmpty, TEXT, form, matching, path, repeated, scalar, section, whole, words,
};
use super::identity::{DomainName, parse_identity};
use crate::wire::{SpkiHash, UNKNOWN_CLUSTER};
use crate::yaml::Value;

/// Default limit of intermediates: one for the mesh, and two above it, such as those of nested
/// SPIRE servers.
pub const VERIFY_DEPTH: usize = 3;
/// Largest limit of intermediates, which is also that of webpki.
const VERIFY_DEPTH_MAX: u16 = 6;

section! {
    /// Trust in peers.
    pub struct Trust at "trust", planned("end_tunnels_at_expiry"), check(check) {
        /// Trust domains whose peers may connect. Peers of other domains are rejected in the
        /// handshake.
        domains: Vec<TrustDomain> = default(
            Vec::new(), "required, unless `skip_validation` is `true`")
            unless json!({"properties": {"skip_validation": {"const": true}},
                "required": ["skip_validation"]});
        /// Clusters by the issuers of their peers' certificates. With this key the issuer alone
        /// determines the cluster of a peer, and not its trust domain.
        clusters: Vec<IssuerCluster> as NonEmpty<IssuerCluster> = default(
            Vec::new(), "a trust domain stands for its cluster")
            unless json!({"not": {"required": ["unknown_issuers"]}});
        /// Treatment of peers whose issuer is not in `trust.clusters`.
        unknown_issuers: UnknownIssuers = default(UnknownIssuers::Accept, "`accept`");
        /// Certificate revocation lists (RFC 5280) for the leaves and intermediates of peers.
        crl: Option<Crl> = default(None, "revocation is not checked");
        /// Limit of the intermediates between a peer's certificate and its root. Roots that a peer
        /// sends, and duplicates, do not count; with them at most 6 certificates are received.
        max_verify_depth: usize as VerifyDepth = default(VERIFY_DEPTH) since "0.1.0";
        /// Acceptance of trust domains that `trust.domains` lacks, under the shared roots alone,
        /// for meshes with Istio's `SKIP_VALIDATE_TRUST_DOMAIN`. The name of such a domain is its
        /// cluster, unless a named domain stands for a cluster of that name. Metrics and shares of
        /// descriptors count all of them as the cluster `unlisted`. The log, `strait status` and a
        /// metric warn of it.
        skip_validation: bool = default(false);
        /// Identities (`spiffe://…`) of waypoints and ingress gateways whose `x-istio-source` is
        /// trusted for every service. Where clusters of peers are distinguished, the waypoints of
        /// the requested service in this cluster are trusted too.
        waypoints: Vec<String> as Vec<WorkloadId> = default(Vec::new());
        /// Identities (`spiffe://…`) of the gateways of other networks that forward tunnels to this
        /// one. Their `x-strait-source` is trusted: the first peer of a tunnel has to be permitted
        /// besides the gateway. They receive the reason for a rejection (`x-strait-outcome`).
        gateways: Vec<String> as Vec<WorkloadId> = default(Vec::new());
    }
}

section! {
    /// A trust domain whose peers may connect.
    pub struct TrustDomain at "trust.domains[]", planned("aliases"),
        compare(|_, read| repeated(read, |one| one.name.clone()))
    {
        /// Name of the trust domain. Patterns are not supported.
        name: String as DomainName = required("east.local");
        /// Cluster of the domain's peers in `exposure`, `links`, metrics and logs, unless
        /// `trust.clusters` determines it.
        cluster: String = default(name.clone(), "the domain's name");
        /// Issuers that may sign for the domain. Peers with a certificate of another one are
        /// rejected.
        issuers: Option<Vec<Issuer>> as Option<NonEmpty<Issuer>> = default(
            None, "every issuer below the domain's roots");
        /// PEM file with roots for this domain alone.
        roots: Option<PathBuf> as Option<Credential> = default(
            None,
            "the roots of `identity`; with `identity.kind: spiffe` the bundle of this domain, \
             without which its peers are rejected"
        );
    }
}

section! {
    /// A cluster and the issuers of its peers' certificates.
    pub struct IssuerCluster at "trust.clusters[]",
        compare(|_, read| repeated(read, |one| one.name.clone()))
    {
        /// Name of the cluster.
        name: String = required("west");
        /// Issuers: each the SHA-256 of a SubjectPublicKeyInfo, or a PEM file in which each
        /// certificate is an issuer.
        issuers: Vec<Issuer> as NonEmpty<Issuer> = required("[west-ca.pem]");
    }
}

/// The authority whose key signs leaves: an intermediate, or a root without one.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum Issuer {
    /// The SHA-256 of its SubjectPublicKeyInfo.
    Hash(SpkiHash),
    /// A PEM file with its certificate, or with those of several.
    #[display("{}", _0.display())]
    File(PathBuf),
}

words! {
    /// Treatment of peers whose issuer has no entry.
    pub enum UnknownIssuers or Accept {
        /// They belong to the cluster `unknown`.
        Accept = "accept",
        /// They are rejected in the handshake.
        Reject = "reject",
    }
}

section! {
    /// Certificate revocation lists (RFC 5280) for the leaves and intermediates of peers.
    pub struct Crl at "trust.crl", check(check_crl) {
        /// Files, each with PEM of any number of lists or with one list in DER, together at most
        /// 16 MiB. Of several lists of one issuer's key and scope the newest counts. A certificate
        /// is looked up in each list whose key signed it and whose issuingDistributionPoint covers
        /// it. Delta lists, indirect lists and lists without nextUpdate are not supported.
        files: Vec<PathBuf> as NonEmpty<CrlFile> = required("[crl.pem]");
        /// Treatment of certificates whose issuer's list is past its nextUpdate. With `reject`,
        /// `strait check` warns of such a list.
        on_stale: CrlPolicy = default(CrlPolicy::Reject);
        /// Treatment of certificates that no list of their issuer, the root included, covers. With
        /// `accept` a file may be absent or empty. With `reject`, `strait check`, the log and
        /// `strait status` name each trusted root without a list, as peers below it are rejected.
        on_missing: CrlPolicy = default(CrlPolicy::Reject);
    }
}

words! {
    /// Treatment of a certificate whose revocation status is not certain.
    pub enum CrlPolicy {
        /// The certificate is rejected.
        Reject = "reject",
        /// The certificate counts as not revoked.
        Accept = "accept",
    }
}

impl Trust {
    /// Returns the names of the clusters that peers may belong to; none where any name may be one.
    pub(super) fn cluster_names(&self) -> Option<BTreeSet<String>> {
        if !self.clusters.is_empty() {
            let unknown = (self.unknown_issuers == UnknownIssuers::Accept)
                .then(|| UNKNOWN_CLUSTER.to_owned());
            let named = self.clusters.iter().map(|cluster| cluster.name.clone());
            return Some(named.chain(unknown).collect());
        }
        let clusters = self.domains.iter().map(|domain| domain.cluster.clone()).collect();
        (!self.skip_validation).then_some(clusters)
    }

    /// Returns the lists of issuers, of clusters and of trust domains.
    pub fn issuer_lists(&mut self) -> impl Iterator<Item = &mut Vec<Issuer>> {
        let clusters = self.clusters.iter_mut().map(|one| &mut one.issuers);
        let domains = self.domains.iter_mut();
        clusters.chain(domains.filter_map(|one| one.issuers.as_mut()))
    }

    /// Returns the files that are watched: roots, issuers and revocation lists.
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
    /// Returns the file, if it is one.
    pub fn file(&self) -> Option<&PathBuf> {
        match self {
            Self::Hash(_) => None,
            Self::File(file) => Some(file),
        }
    }
}

/// Checks keys together. Issuers without an entry need entries, and only `skip_validation` makes
/// up for missing domains.
fn check(trust: Trust, value: Value<'_>) -> Option<Trust> {
    if let Some(given) = value.child("trust", "unknown_issuers")
        && trust.clusters.is_empty()
    {
        let what = "applies to issuers outside `trust.clusters`, which is not set";
        given.error(what, "`trust.clusters` too, or remove it");
        return None;
    }
    if trust.skip_validation {
        let what = "is true: a peer of any trust domain is accepted under the shared roots, and \
                    its domain's name stands for its cluster";
        let how = "`trust.domains` with each domain instead";
        value.at("trust", "skip_validation").warning(what, how);
    } else if trust.domains.is_empty() {
        let how = "`domains: [{name: east.local, cluster: east}]`";
        match value.child("trust", "domains") {
            Some(list) => list.error("is empty, which would reject every peer", how),
            None => value.error("has no `domains`", how),
        }
        return None;
    }
    Some(trust)
}

/// Looks for the files, which may be absent only if missing lists are accepted.
fn check_crl(crl: Crl, value: Value<'_>) -> Option<Crl> {
    if crl.on_missing == CrlPolicy::Accept {
        return Some(crl);
    }
    let files = value.at("trust.crl", "files").entries();
    let files: Vec<_> = files.map(Value::credential_path).collect();
    files.iter().all(Option::is_some).then_some(crl)
}

scalar! {
    Issuer => Issuer, "64 hexadecimal digits, or the path of a PEM file", TEXT,
        |value, _| issuer(value), |issuer| json!(issuer.to_string());
}

form! {
    /// A file of revocation lists, which is watched. [`check_crl`] looks whether it exists.
    CrlFile => PathBuf, "the path of a file, relative to the file that names it", "string",
        |value, _| value.watched_path(), |file| path(file);
    /// A limit of intermediates.
    VerifyDepth => usize, "a whole number from 0 to 6", whole(0_u32, VERIFY_DEPTH_MAX),
        |value, _| value.number(0, VERIFY_DEPTH_MAX).map(Into::into), |depth| json!(depth);
    /// The identity of a workload, as its certificate has it.
    WorkloadId => String, "an identity, such as `spiffe://west.local/ns/app/sa/waypoint`",
        matching("^spiffe://[^/]+/ns/[^/]+/sa/[^/]+$"),
        |value, wanted| value.parsed(wanted, |text| {
            parse_identity(text).map(|_| text.to_owned())
        }),
        |id| json!(id);
}

fn issuer(value: Value<'_>) -> Option<Issuer> {
    /// Length from which hexadecimal digits are a hash with a mistake, and no file.
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

#[cfg(test)]
mod tests {
    use crate::config::tests::{GOOD, check};

    use super::*;

    const HASH: &str = "0123456789abcdef0123456789abcdef0123456789ABCDEF0123456789ABCDEF";

    #[test]
    fn with_issuers_their_clusters_and_unknown_are_all_that_there_is() {
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
                "is `west`, which is not a cluster of `trust`; write one of `north`, `unk",
            ),
            ("\n  unknown_issuers: reject", "north", ""),
            ("\n  unknown_issuers: reject", "unknown", "write one of `north`"),
        ] {
            let (_, reported) = file(more, cluster);
            let is_wanted = reported.contains(want) && reported.is_empty() == want.is_empty();
            assert!(is_wanted, "{more} {cluster}: {reported}");
        }
        let (config, _) = file("\n  unknown_issuers: reject", "north");
        let trust = config.expect("a configuration").trust;
        assert_eq!(trust.unknown_issuers, UnknownIssuers::Reject);
        let shown = serde_json::to_value(&trust).expect("JSON");
        assert_eq!(shown["clusters"][0]["issuers"][0], HASH.to_lowercase());
        assert_eq!(shown["unknown_issuers"], "reject");
    }

    #[test]
    fn the_depth_of_chains_and_the_treatment_of_missing_lists_are_read() {
        let of = |more: &str| {
            let (config, reported) = check(&GOOD.replacen("  domains:", more, 1));
            assert_eq!(reported, "", "{more}");
            config.expect("a configuration").trust
        };
        assert_eq!(of("  domains:").max_verify_depth, 3);
        assert_eq!(of("  max_verify_depth: 0\n  domains:").max_verify_depth, 0);
        let crl = of("  crl: {files: [/absent.pem], on_missing: accept}\n  domains:").crl;
        let crl = crl.expect("revocation lists");
        assert_eq!((crl.on_missing, crl.on_stale), (CrlPolicy::Accept, CrlPolicy::Reject));
    }

    #[test]
    fn a_domain_may_name_its_issuers() {
        let of = |issuers: &str| {
            let new = format!("{{name: west.local, cluster: west, issuers: {issuers}}}");
            check(&GOOD.replacen("{name: west.local, cluster: west}", &new, 1))
        };
        let (config, reported) = of(&format!("[{HASH}, Cargo.toml]"));
        assert_eq!(reported, "");
        let mut trust = config.expect("a configuration").trust;
        let hash = SpkiHash::parse(HASH).expect("a hash");
        let issuers = trust.domains[1].issuers.as_ref().expect("issuers");
        assert_eq!(issuers[0], Issuer::Hash(hash));
        assert!(trust.files().any(|file| file.ends_with("Cargo.toml")));
        assert_eq!(trust.issuer_lists().count(), 1);
        let (_, reported) = of("[]");
        let want = "6: error: `trust.domains[].issuers` is empty; write at least one entry";
        assert_eq!(reported, want);
    }
}
