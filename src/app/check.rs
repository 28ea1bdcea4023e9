//! Checks of files for commands that do not serve. They also work without the gateway's
//! certificates, such as on a laptop or a CI runner.

use std::io::ErrorKind;

use crate::config::{Examined, Identity, Source};
use crate::datapath::accept;
use crate::labels::join_first;
use crate::yaml::Severity;

use super::inputs::{Report, control_planes, load_and_check};
use super::listeners::ClosedListeners;

/// Maximum number of absent files in the warning.
const NAMED_MAX: usize = 8;

/// Checks all files. Missing certificates, keys and tokens are a warning if the machine has no
/// credential of the gateway, and errors otherwise.
pub fn check(source: &Source, examined: Examined) -> Report {
    if has_credential(&examined) {
        check_as_gateway(source, examined.strict())
    } else {
        check_with_absent_files(source, examined)
    }
}

/// Checks all files for a command that needs no certificates; missing ones are a warning.
pub fn check_without_keys(source: &Source) -> Report {
    check_with_absent_files(source, source.examine_without_keys())
}

fn check_as_gateway(source: &Source, examined: Examined) -> Report {
    let mut report = load_and_check(source, examined);
    let closed = unavailable_addresses(&report, "error");
    report.errors.extend(closed.own);
    report.skipped_objects.extend(closed.of_objects);
    report
}

/// Returns the bindings on whose addresses this process cannot listen. An address in use may be
/// that of the running gateway.
fn unavailable_addresses(report: &Report, severity: &str) -> ClosedListeners {
    let config = report.inputs.as_ref().map(|inputs| &inputs.config);
    let mut closed = ClosedListeners::default();
    for binding in config.into_iter().flat_map(|config| &config.bindings) {
        let Err(error) = accept::reserve(binding.listen) else {
            continue;
        };
        let ip = binding.listen.ip();
        let how = match error.kind() {
            ErrorKind::AddrInUse => continue,
            ErrorKind::PermissionDenied => {
                "write a port from 1024 on, or add the capability NET_BIND_SERVICE".to_owned()
            }
            _ => format!(
                "write an address of this host, or route the network of {ip} to it by `ip route \
                 add local NETWORK dev lo`"
            ),
        };
        let message = format!(
            "{}: {severity}: the binding of {} cannot listen on {}: {error}; {how}",
            binding.line, binding.service, binding.listen
        );
        closed.push(binding.is_of_object, message);
    }
    closed
}

fn check_with_absent_files(source: &Source, mut examined: Examined) -> Report {
    let has_absent = examined.findings.0.iter().any(|finding| finding.severity == Severity::Absent);
    examined.findings.0.retain(|finding| finding.severity != Severity::Absent);
    let warning = has_absent.then(|| warning(&examined)).flatten();
    let mut report = load_and_check(source, examined);
    let closed = unavailable_addresses(&report, "warning");
    report.warnings.extend(closed.own.into_iter().chain(closed.of_objects));
    report.warnings.splice(0..0, warning.clone());
    report.absent = warning;
    report
}

/// Returns true if the machine has a credential of the gateway: its certificate, its key, or a
/// token.
fn has_credential(examined: &Examined) -> bool {
    let own = match &examined.identity {
        Some(Identity::Files(files)) => vec![&files.chain, &files.key],
        _ => Vec::new(),
    };
    let tokens = control_planes(examined).filter_map(|plane| plane.token.as_ref());
    own.into_iter().chain(tokens).any(|file| !examined.is_absent(file))
}

/// Returns one warning about all files that do not exist, at the place that names the first one.
fn warning(examined: &Examined) -> Option<String> {
    let (_, place) = examined.absent.first()?;
    let mut named: Vec<_> = examined.absent.iter().map(|(file, _)| file).collect();
    named.sort_unstable();
    named.dedup();
    let named = join_first(named.iter().map(|file| file.display()), NAMED_MAX);
    Some(format!(
        "{place}: warning: certificates were not checked: {named} do not exist here; put them \
         there before `strait run`, which refuses to start without them"
    ))
}
