//! Checks of the own certificate, of the roots, and of the clock.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use humantime::format_rfc3339_seconds;
use tokio::time::timeout;

use super::finding::{Finding, Outcome};
use crate::app;
use crate::config::{Examined, Identity, Source, Trust, TrustDomain};
use crate::tls::{IdentityMaterial, PeerTrust};

const CERTIFICATE: &str = "certificate";
const ROOTS: &str = "roots";
const CLOCK: &str = "clock";

/// Texts of a certificate whose validity begins later: of a refusal, of rustls, and of an answer of
/// an authority.
const NOT_YET: [&str; 3] = ["not_yet_valid", "not valid yet", "not valid before"];
/// Text of a certificate or root whose validity has ended.
const EXPIRED: &str = "expired";
/// Deadline for a certificate from an authority or an agent, including the connection.
const DEADLINE: Duration = Duration::from_secs(16);

/// Checks the own certificate as a peer does, and returns it if it can be used. Requests one if the
/// gateway would at its start, and if this may.
pub(super) async fn own(
    source: &Source,
    examined: &Examined,
    may_request: bool,
) -> (Option<Arc<IdentityMaterial>>, Vec<Finding>) {
    let of_files = |error: String, remedy: &str| {
        let mut finding = Finding::of_message(CERTIFICATE, Outcome::Failure, &error);
        finding.remedy.get_or_insert_with(|| remedy.to_owned());
        finding
    };
    let loaded = match (&examined.identity, &examined.config) {
        (Some(Identity::Files(files)), _) => IdentityMaterial::load(files)
            .map(Arc::new)
            .map_err(|error| of_files(error.to_string(), "have a new one issued")),
        (Some(_), Some(config)) if may_request => {
            let request = app::request_certificate(source, config.clone());
            let issued = timeout(DEADLINE, request).await.ok().flatten();
            let issued = issued.unwrap_or_else(|| Err("no answer in time".to_owned()));
            // The text of another program names no remedy of ours.
            let remedy = "look at the log of the authority, and at the token that it judges";
            let failure =
                |why| Finding::failure(CERTIFICATE, format!("none was issued: {why}"), remedy);
            issued.map_err(failure)
        }
        (Some(issued), _) => {
            let found = format!("is issued at the start (`identity.kind: {}`)", issued.kind());
            return (None, vec![Finding::ok(CERTIFICATE, found)]);
        }
        (None, _) => {
            let error = "the configuration names none".to_owned();
            Err(of_files(error, "write the section `identity`"))
        }
    };
    let own = match loaded {
        Ok(own) => own,
        Err(finding) => return (None, vec![finding]),
    };
    let uri = &own.identity.uri;
    let until = format_rfc3339_seconds(own.valid_until);
    let finding = match own.status().renewal_problem(SystemTime::now()) {
        Some(problem) => {
            let found = format!("{uri}, valid until {until}, {problem}");
            Finding::warning(CERTIFICATE, found, "renew it, or look why it was not renewed")
        }
        None => {
            let found = format!(
                "{uri}, valid until {until}, with its key, a chain to the own roots, and usages of \
                 server and client"
            );
            Finding::ok(CERTIFICATE, found)
        }
    };
    (Some(own), vec![finding])
}

/// Checks the roots of each trust domain.
pub(super) fn roots(examined: &Examined) -> Vec<Finding> {
    let Some(trust) = &examined.trust else {
        let remedy = "write the section `trust`";
        return vec![Finding::failure(ROOTS, "no trust domain is configured", remedy)];
    };
    let shared = match &examined.identity {
        Some(Identity::Files(files)) => Some(&files.roots),
        _ => None,
    };
    let domains = trust.domains.iter();
    domains
        .map(|domain| {
            let roots = domain.roots.as_ref().or(shared).cloned();
            let Some(file) = roots.clone() else {
                let found = format!("those of {} come with the own certificate", domain.name);
                return Finding::ok(ROOTS, found);
            };
            let domain = TrustDomain { roots, issuers: None, ..domain.clone() };
            let name = domain.name.clone();
            let trust =
                Trust { domains: vec![domain], clusters: Vec::new(), crl: None, ..trust.clone() };
            let loaded = PeerTrust::load(&trust);
            let end = match &loaded {
                Ok(loaded) => loaded.domains.iter().find_map(|one| one.expiry()),
                Err(error) => {
                    let found = format!("trust domain {name} has no usable root: {error}");
                    let mut finding = Finding::of_message(ROOTS, Outcome::Failure, &found);
                    finding.remedy.get_or_insert_with(|| "write the roots of its mesh".to_owned());
                    return finding;
                }
            };
            let end = end.unwrap_or(SystemTime::UNIX_EPOCH);
            let (until, file) = (format_rfc3339_seconds(end), file.display());
            if end <= SystemTime::now() {
                let found =
                    format!("trust domain {name} has a root in {file} that expired at {until}");
                // The same root in several files is one.
                let failure =
                    Finding::failure(ROOTS, found, "replace it by the current root there");
                return failure.of(until);
            }
            Finding::ok(ROOTS, format!("trust domain {name} has roots in {file} until {until}"))
        })
        .collect()
}

/// Compares the clock with the certificates that other checks have found. It is probably ahead if
/// several of different origins have expired.
pub(super) fn clock<'a>(findings: impl Iterator<Item = &'a Finding> + Clone) -> Finding {
    let is_early = |one: &&Finding| NOT_YET.iter().any(|text| one.found.contains(text));
    let is_late = |one: &&Finding| one.outcome == Outcome::Failure && one.found.contains(EXPIRED);
    let now = format_rfc3339_seconds(SystemTime::now());
    let remedy = "synchronize the clocks of this host and of the certificate's issuer by NTP";
    if let Some(Finding { check, .. }) = findings.clone().find(is_early) {
        let found = format!("it is {now} here, before the validity of a certificate (see {check})");
        return Finding::failure(CLOCK, found, remedy);
    }
    let late: BTreeSet<_> = findings.filter(is_late).map(|one| (one.check, &one.origin)).collect();
    match late.len() {
        0 => Finding::ok(CLOCK, format!("it is {now}, in the validity of all certificates")),
        1 => {
            Finding::ok(CLOCK, format!("it is {now}, and certificates of one origin have expired"))
        }
        late => {
            let found = format!(
                "it is {now} here, after the validity of {late} certificates of different origin"
            );
            Finding::warning(CLOCK, found, remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_ahead_if_certificates_of_different_origin_have_expired() {
        let root = |origin| Finding::failure(ROOTS, "a root that expired", "").of(origin);
        let own = || Finding::failure(CERTIFICATE, "refused (expired)", "");
        for (findings, outcome) in [
            (vec![root("2026")], Outcome::Ok),
            (vec![root("2026"), root("2026")], Outcome::Ok),
            (vec![root("2026"), root("2025")], Outcome::Warning),
            (vec![own()], Outcome::Ok),
            (vec![own(), root("2026"), root("2026")], Outcome::Warning),
        ] {
            let clock = clock(findings.iter());
            assert_eq!(clock.outcome, outcome, "{findings:?}: {}", clock.found);
        }
    }
}
