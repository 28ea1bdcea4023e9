//! Checks of the own certificate, of the roots, and of the clock.

use std::time::SystemTime;

use humantime::format_rfc3339_seconds;

use super::finding::{Finding, Outcome};
use crate::config::{Examined, Identity, Trust, TrustDomain};
use crate::tls::{IdentityMaterial, PeerTrust};

const CERTIFICATE: &str = "certificate";
const ROOTS: &str = "roots";
const CLOCK: &str = "clock";

/// Texts of a certificate whose validity begins later: of a refusal, and of rustls.
const NOT_YET: [&str; 2] = ["not_yet_valid", "not valid yet"];

/// Checks the own certificate as a peer does, and returns it if it can be used.
pub(super) fn own(identity: Option<&Identity>) -> (Option<IdentityMaterial>, Vec<Finding>) {
    let files = match identity {
        Some(Identity::Files(files)) => files,
        Some(issued) => {
            let found = format!("is issued at the start (`identity.kind: {}`)", issued.kind());
            return (None, vec![Finding::ok(CERTIFICATE, found)]);
        }
        None => {
            let remedy = "write the section `identity`";
            let found = "the configuration names none";
            return (None, vec![Finding::failure(CERTIFICATE, found, remedy)]);
        }
    };
    let own = match IdentityMaterial::load(files) {
        Ok(own) => own,
        Err(error) => {
            let mut finding =
                Finding::of_message(CERTIFICATE, Outcome::Failure, &error.to_string());
            finding.remedy.get_or_insert_with(|| "have a new one issued".to_owned());
            return (None, vec![finding]);
        }
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
                return Finding::failure(ROOTS, found, "replace it by the current root there");
            }
            Finding::ok(ROOTS, format!("trust domain {name} has roots in {file} until {until}"))
        })
        .collect()
}

/// Compares the clock with the certificates that other checks have found.
pub(super) fn clock<'a>(mut findings: impl Iterator<Item = &'a Finding>) -> Finding {
    let is_early = |one: &&Finding| NOT_YET.iter().any(|text| one.found.contains(text));
    let now = format_rfc3339_seconds(SystemTime::now());
    match findings.find(is_early) {
        Some(Finding { check, .. }) => Finding::failure(
            CLOCK,
            format!("it is {now} here, before the validity of a certificate (see {check})"),
            "synchronize the clocks of this host and of the certificate's issuer by NTP",
        ),
        None => Finding::ok(CLOCK, format!("it is {now}, in the validity of all certificates")),
    }
}
